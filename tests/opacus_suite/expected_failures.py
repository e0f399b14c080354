"""Opacus's tests that do not pass against flash clipping, and why. Only ever made shorter."""

BATCH_FIRST = "refused: batch_first=False (docs/flash.md)"
TAKEN = "the test wants a refusal, and flash clipping takes the model"
INTERNAL = "reads an internal of Opacus's GradSampleModule: ft_compute_sample_grad"

EXPECTED_FAILURES: dict[str, str] = {
    **{
        f"privacy_engine_test.py::PrivacyEngineText*Test::test_{name}": BATCH_FIRST
        for name in (
            "basic",
            "checkpoints",
            "compare_to_vanilla",
            "deterministic_run",
            "flat_clipping",
            "make_private_with_epsilon",
            "noise_changes_every_time",
            "per_layer_clipping",
            "noise_level",
            "sample_grad_aggregation",
        )
    },
    "gradient_accumulation_test.py::*::test_batch_splitter_zero_grad": (
        "wants an error where zero_grad() is not called between the parts of a logical batch; with flash clipping "
        "nothing is summed twice there"
    ),
    "gradient_accumulation_test.py::*::test_privacy_engine_no_poisson_accumulation": (
        "reads sums that have no noise yet from .grad; flash clipping keeps them in the engine until noise is added"
    ),
    "dp_multihead_attention_test.py::*::test_multihead_attention": BATCH_FIRST,
    "embedding_bag_test.py::*::test_input_across_dims": "refused: one list of the words of all samples, with offsets",
    "privacy_engine_validation_test.py::*::test_custom_linear_hooks": INTERNAL,
    "privacy_engine_validation_test.py::*::test_unsupported_hooks": INTERNAL,
    "privacy_engine_validation_test.py::*::test_extra_param_hooks_requires_grad": INTERNAL,
    "privacy_engine_validation_test.py::*::test_unsupported_ew": TAKEN,
    "privacy_engine_validation_test.py::*::test_extra_param_ew": TAKEN,
}
