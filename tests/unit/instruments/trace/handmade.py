"""A trace of one GPU step, written by hand: every figure in it can be worked out on paper. Microseconds."""

from __future__ import annotations

from typing import Any

MAIN, ENGINE, STREAM, OTHER_STREAM = 1, 2, 7, 8
START = 1_000_000.0


def event(category: str, name: str, start: float, duration: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    process = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 42
    place = {"pid": process, "tid": thread, "ts": START + start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, "args": args}


def operator(name: str, start: float, duration: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, start, duration, thread, **args)


def annotation(name: str, start: float, duration: float) -> dict[str, Any]:
    return event("user_annotation", name, start, duration)


def call(name: str, start: float, duration: float, correlation: int, thread: int = MAIN) -> dict[str, Any]:
    return event("cuda_runtime", name, start, duration, thread, correlation=correlation)


def kernel(name: str, start: float, duration: float, correlation: int, stream: int = STREAM) -> dict[str, Any]:
    return event("kernel", name, start, duration, stream, correlation=correlation)


def copy(name: str, start: float, duration: float, correlation: int, size: int) -> dict[str, Any]:
    return event("gpu_memcpy", name, start, duration, STREAM, correlation=correlation, bytes=size)


def gpu_step() -> list[dict[str, Any]]:
    """A step of 1000: the GPU works in 385 of it, and 40 of its work lies beside other work."""
    return [
        annotation("ProfilerStep#3", 0, 1000),
        event("python_function", "train.py(12): step", 0, 1000),
        # the batch is copied to the GPU before any phase
        operator("aten::to", 10, 60),
        call("cudaMemcpyAsync", 20, 10, 1),
        copy("Memcpy HtoD (Pageable -> Device)", 40, 20, 1, 4096),
        annotation("forward", 100, 200),
        annotation("module: head", 105, 110),
        operator("aten::linear", 110, 100, **{"Sequence number": 5, "Fwd thread id": 0}),
        operator("aten::addmm", 120, 80, **{"Sequence number": 5, "Fwd thread id": 0}),
        call("cudaLaunchKernel", 150, 10, 2),
        kernel("nvjet_tst_128x64_TNT", 200, 100, 2),
        # autograd launches from a thread of its own
        annotation("backward", 300, 300),
        operator(
            "autograd::engine::evaluate_function: AddmmBackward0",
            310,
            100,
            ENGINE,
            **{"Sequence number": 5, "Fwd thread id": 1},
        ),
        operator("AddmmBackward0", 320, 80, ENGINE, **{"Sequence number": 5, "Fwd thread id": 1}),
        operator("aten::mm", 330, 60, ENGINE),
        call("cudaLaunchKernel", 350, 10, 3, ENGINE),
        kernel("nvjet_tst_256x64_NNT", 380, 150, 3),
        # a norm, and Python asks for its value
        annotation("clip", 600, 150),
        operator("aten::linalg_vector_norm", 605, 20),
        call("cudaLaunchKernel", 610, 5, 4),
        kernel("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", 640, 30, 4),
        operator("aten::item", 650, 90),
        event("python_function", "torch/_tensor.py(3): item", 645, 100),
        operator("aten::_local_scalar_dense", 655, 80),
        call("cudaMemcpyAsync", 660, 5, 5),
        copy("Memcpy DtoH (Device -> Pinned)", 675, 5, 5, 4),
        call("cudaStreamSynchronize", 666, 60, 105),
        # a kernel that no operator launched, and one beside it on another stream
        annotation("optimizer", 760, 100),
        {**call("cuLaunchKernelEx", 780, 10, 6), "cat": "cuda_driver"},
        kernel("_adam_kernel", 800, 80, 6),
        operator("aten::mul_", 795, 20),
        call("cudaLaunchKernel", 800, 5, 7),
        kernel("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", 820, 40, 7, OTHER_STREAM),
        # ours: no wait of the step's
        annotation("wait for the GPU", 900, 90),
        call("cudaDeviceSynchronize", 905, 80, 106),
    ]
