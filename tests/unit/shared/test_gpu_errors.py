"""What errors of CUDA and NCCL mean; the texts are those that torch and NCCL print."""

import pytest

from nbdist.shared.gpu_errors import assertions, explain, without_frames, without_repeated_advice

SOURCES = "/pytorch/aten/src/ATen/native/cuda"
AT = "block: [12,0,0], thread: [0,0,0]"
EMBEDDING = (
    f"{SOURCES}/Indexing.cu:1422: indexSelectLargeIndex: {AT} "
    "Assertion `srcIndex < srcSelectDimSize` failed."
)
ADVICE = (
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
ASSERT = f"CUDA error: device-side assert triggered\n{ADVICE}"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "


@pytest.mark.parametrize(
    ("line", "means"),
    [
        (EMBEDDING, "An index is out of range in an embedding"),
        (
            (
                f"{SOURCES}/IndexKernelUtils.cu:16: vectorized_gather_kernel: {AT} Assertion "
                '`ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of '
                'bounds"` failed.'
            ),
            "An index is out of range in an embedding, index_select or gather",
        ),
        (
            (
                f"{SOURCES}/ScatterGatherKernel.cu:163: operator(): {AT} Assertion "
                '`idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.'
            ),
            "An index is out of range in a gather, a scatter",
        ),
        (
            (
                f"{SOURCES}/IndexKernel.cu:111: operator(): {AT} Assertion "
                '`-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.'
            ),
            "An index is out of range in a gather, a scatter or x[index]",
        ),
        (
            (
                f"{SOURCES}/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: {AT} "
                "Assertion `t >= 0 && t < n_classes` failed."
            ),
            "A class label for nll_loss or cross_entropy is outside of the number of classes",
        ),
        (
            (
                f"{SOURCES}/Loss.cu:92: operator(): {AT} "
                "Assertion `input_val >= zero && input_val <= one` failed."
            ),
            "An input of binary_cross_entropy is not between 0 and 1",
        ),
        (
            (
                f"{SOURCES}/TensorCompare.cu:112: _assert_async_cuda_kernel: {AT} "
                "Assertion `input[0] != 0` failed."
            ),
            "A number is negative, nan or inf",
        ),
        (
            f"/tmp/kernels/mine.cu:7: mine: {AT} Assertion `false` failed.",
            "A check in a kernel on the GPU failed (mine.cu:7)",
        ),
        # Behind a progress bar, and as a build without names of functions writes it.
        (f" 0%|  | 0/9 [00:00<?, ?it/s]{EMBEDDING}", "(Indexing.cu:1422)"),
        (
            f"C:\\cuda\\Indexing.cu:9: {AT} Assertion `srcIndex < n` failed.",
            "(Indexing.cu:9)",
        ),
    ],
)
def test_a_kernels_assertion_is_told_in_words_with_its_file(line: str, means: str) -> None:
    assert assertions(["a line", line, "another"]) == (line,)
    known = explain(ASSERT, line)
    assert known is not None
    assert means in known.why
    assert known.said in line
    assert known.ends_context


@pytest.mark.parametrize(
    ("text", "why", "do"),
    [
        (
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs",
            "others hold it",
            "nvidia-smi",
        ),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "no code for this kind of GPU",
            "install a build of torch",
        ),
        (
            "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
            "driver is too old",
            "update the driver",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 11040). Please update",
            "driver is too old",
            "update the driver",
        ),
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            "no NVIDIA driver",
            "--gpus all",
        ),
        ("Torch not compiled with CUDA enabled", "for the CPU alone", "for CUDA"),
        ("No CUDA GPUs are available", "shows no GPU", "CUDA_VISIBLE_DEVICES"),
        (
            (
                "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have "
                "enough GPUs?"
            ),
            "no GPU of that number",
            "fewer ranks",
        ),
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "exclusive mode",
            "nvidia-smi -c DEFAULT",
        ),
        (
            "CUDA error: all CUDA-capable devices are busy or unavailable",
            "exclusive mode",
            "nvidia-smi -c DEFAULT",
        ),
        (
            (
                f"{NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29\n"
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast "
                "error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 6000"
            ),
            "Two ranks have the same GPU",
            "--backend gloo",
        ),
        (
            (
                f"{NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL "
                "version 2.29.7\nncclSystemError: System call (e.g. socket, malloc) or external "
                "library call failed or device error. \nLast error:\n"
            ),
            "NCCL could not get something",
            "NCCL_DEBUG=INFO",
        ),
        (
            (
                "[Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7753, "
                "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600003 "
                "milliseconds before timing out."
            ),
            "did not end within its time",
            "--timeout",
        ),
        ("NCCL communicator was aborted on rank 0. ", "after another error", "%dist retry"),
    ],
)
def test_each_error_has_one_meaning_and_one_thing_to_do(text: str, why: str, do: str) -> None:
    known = explain(text)
    assert known is not None
    assert why in known.why
    assert do in known.do
    assert known.said in text
    assert not known.ends_context


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
    ],
)
def test_what_ends_a_cuda_context_takes_a_new_process(said: str) -> None:
    known = explain(f"{said}\n{ADVICE}")
    assert known is not None
    assert known.ends_context
    assert "an earlier line may have caused it" in known.why


def test_of_several_things_an_assertion_is_the_cause() -> None:
    text = f"{EMBEDDING}\nProcess group watchdog thread terminated: NCCL communicator was aborted"
    known = explain(text)
    assert known is not None
    assert known.said == "Assertion `srcIndex < srcSelectDimSize` failed"


def test_an_assertion_explains_no_error_that_leaves_the_context_whole() -> None:
    known = explain("CUDA error: invalid device ordinal", EMBEDDING)
    assert known is not None
    assert "srcIndex" not in known.said


@pytest.mark.parametrize(
    "text",
    [
        # Said well by torch itself, and the cell may be mended: as any other error of a cell.
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB",
        "python: pool.c:12: take: Assertion `n > 0' failed.",
        "index 512 is out of bounds for dimension 0 with size 10",
        "",
    ],
)
def test_other_errors_are_left_to_others(text: str) -> None:
    assert explain(text) is None


def test_torchs_general_advice_is_given_once_and_never_where_the_error_is_explained() -> None:
    lines = [*ASSERT.splitlines(), "During handling of the above:", *ASSERT.splitlines()]
    assert "\n".join(without_repeated_advice(lines, explained=False)).count("LAUNCH_BLOCKING") == 1
    kept = list(without_repeated_advice(lines, explained=True))
    said = "CUDA error: device-side assert triggered"
    assert kept == [said, "During handling of the above:", said]


def test_a_cpp_stack_is_left_out() -> None:
    text = [
        "CUDA error: device-side assert triggered",
        (
            "Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/"
            "CUDAException.cpp:44 (most recent call first):"
        ),
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f in /x/libc10.so)",
        "frame #10: <unknown function> + 0xdbbf4 (0x7f30c8a5dbf4 in /lib64/libstdc++.so.6)",
    ]
    assert list(without_frames(text)) == text[:1]
