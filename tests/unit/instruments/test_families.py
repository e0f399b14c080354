"""Kernel names, real ones, and the family a person would put them in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dpscope.flash.kernels.triton_runtime as kernels_home
from dpscope.instruments.families import kernel_family, short_kernel_name
from dpscope.instruments.ncu.reading import read_report
from dpscope.vocabulary.phases import (
    ATTENTION,
    CLIPPING,
    COPY,
    ELEMENTWISE,
    EMBEDDING,
    GEMM,
    NOISE_FAMILY,
    NORMALISATION,
    OPTIMIZER_FAMILY,
    OTHER,
    REDUCTION,
)

NAMES = {
    "nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT": GEMM,
    "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float>": GEMM,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(T1::Params)": GEMM,
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4": GEMM,
    "ampere_sgemm_128x64_nn": GEMM,
    "void gemv2T_kernel_val<int, int, float, float, float, float, (int)128>": GEMM,
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128>>": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>)": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0": ATTENTION,
    "void at::native::<unnamed>::vectorized_layer_norm_kernel<float, float, (bool)0>(int)": NORMALISATION,
    "void at::native::<unnamed>::GammaBetaBackwardCUDAKernelTemplate<float, float>": NORMALISATION,
    "void at::native::vectorized_elementwise_kernel<(int)8, at::native::bfloat16_copy_kernel_cuda(at::T &)>": COPY,
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>": COPY,
    "void at::native::<unnamed>::CatArrayBatchedCopy<at::native::OpaqueType<4>, unsigned int, 3, 64>": COPY,
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>": ELEMENTWISE,
    "void at::native::vectorized_elementwise_kernel<(int)8, at::native::GeluCUDAKernelImpl(at::T &)>": ELEMENTWISE,
    "void at::native::reduce_kernel<(int)128, (int)4, at::native::ReduceOp<c10::BFloat16>>": REDUCTION,
    "void at::native::<unnamed>::cunn_SoftMaxForwardReg<c10::BFloat16, float>": REDUCTION,
    "void at::native::<unnamed>::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>": REDUCTION,
    "void at::native::<unnamed>::embedding_backward_feature_kernel<float, float, long>": EMBEDDING,
    "void at::native::vectorized_gather_kernel<(int)16, long>(char *)": EMBEDDING,
    "void at::native::<unnamed>::multi_tensor_apply_kernel"
    "<T<(int)4>, FusedAdamMathFunctor<float, 4>>": OPTIMIZER_FAMILY,
    "void at::native::<unnamed>::multi_tensor_apply_kernel<T<(int)2>, LpNormFunctor<float, NormType::L2>>": REDUCTION,
    "void at::native::<unnamed>::distribution_elementwise_grid_stride_kernel"
    "<float, 4, normal_and_transform>": NOISE_FAMILY,
    "_gram_kernel": CLIPPING,
    "_gram_finish_kernel": CLIPPING,
    "_scaled_sum_kernel": GEMM,
    "_sample_products_kernel": GEMM,
    "_adam_kernel": OPTIMIZER_FAMILY,
    "_add_noise_kernel": NOISE_FAMILY,
    "triton_poi_fused__to_copy_3": COPY,
    "triton_poi_fused_clone_transpose_0": COPY,
    "triton_poi_fused__to_copy_add_gelu_12": ELEMENTWISE,
    "triton_poi_fused_bmm_mul_7": ELEMENTWISE,
    "triton_for_fused_1": ELEMENTWISE,
    "triton_red_fused__to_copy_sum_view_4": REDUCTION,
    "triton_per_fused_add_native_layer_norm_native_layer_norm_backward_9": NORMALISATION,
    "triton_red_fused__log_softmax_nll_loss_backward_2": REDUCTION,
    "triton_poi_fused_add_embedding_0": EMBEDDING,
    "triton_tem_fused_addmm_relu_5": GEMM,
    "triton_tem_fused_flex_attention_1": ATTENTION,
    "my_own_thing": OTHER,
}


@pytest.mark.parametrize(("name", "family"), NAMES.items())
def test_a_kernel_belongs_to_the_family_a_person_would_name(name, family):
    assert kernel_family(name) == family


def test_every_kernel_of_flash_clipping_has_a_family():
    sources = Path(kernels_home.__file__).parent.glob("*.py")
    launched = {name for path in sources for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M)}
    assert len(launched) >= 6
    besides = {"_shifted_copy_kernel": COPY, "_rms_norm_kernel": NORMALISATION}
    assert {name: kernel_family(name) for name in besides} == besides
    others = launched - besides.keys()
    assert {kernel_family(name) for name in others} == {CLIPPING, GEMM, NOISE_FAMILY, OPTIMIZER_FAMILY}


def test_no_kernel_of_a_real_step_is_left_over(ncu_captures, no_ncu):
    families = {kernel_family(action.name) for action in read_report(ncu_captures["kernels"])}
    assert OTHER not in families
    assert families >= {GEMM, ATTENTION, NORMALISATION, COPY, ELEMENTWISE, REDUCTION, EMBEDDING, OPTIMIZER_FAMILY}


@pytest.mark.parametrize(
    ("phase", "family"), [(None, ELEMENTWISE), ("forward", ELEMENTWISE), ("clip", CLIPPING), ("noise", NOISE_FAMILY)]
)
def test_a_generic_kernel_does_the_work_of_its_phase(phase, family):
    assert kernel_family("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", phase) == family


def test_a_matrix_product_stays_one_in_every_phase():
    assert kernel_family("nvjet_sm90_tst_64x64", "clip") == GEMM


def test_short_names_keep_what_tells_kernels_apart():
    copy = "void at::native::vectorized_elementwise_kernel<(int)8, at::native::bfloat16_copy_kernel_cuda(at::B &)>(int)"
    assert short_kernel_name(copy) == "vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda>"
    assert short_kernel_name("nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT") == "nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT"
    assert len(short_kernel_name("k" * 500)) == 80
