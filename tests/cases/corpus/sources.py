"""The lines of PyTorch that the labels rest on, each read at one tag."""

from __future__ import annotations

from tests.cases.corpus.snippet import Thread

from torchtrim.syncs.base import Citation

_REF = "v2.12.1"


def line(path: str, number: int, note: str) -> Citation:
    """A line of PyTorch."""
    return Citation(repository="pytorch/pytorch", ref=_REF, path=path, line=number, note=note)


def aten(path: str, number: int, note: str) -> Citation:
    """A line of ATen's operators."""
    return line(f"aten/src/ATen/native/{path}", number, note)


def thread(repository: str, number: int, note: str) -> Thread:
    """A public thread."""
    return Thread(repository=repository, number=number, note=note)


def filled(number: int, note: str) -> Citation:
    """A line of torch 2.15 that fills what until then a moved or copied number was assigned to."""
    path = "aten/src/ATen/TensorIndexing.h"
    return Citation(repository="pytorch/pytorch", ref="v2.15.0", path=path, line=number, note=note)


# What waits.
READ = aten("cuda/CUDAScalar.cu", 61, "memcpy_and_sync of one element")
INDEX = line(
    "tools/autograd/templates/python_variable_methods.cpp", 383, "__index__ reads the value"
)
SELECT = line("aten/src/ATen/TensorIndexing.h", 507, "a 0-dim index is read")
NUMBER = line("torch/csrc/utils/python_arg_parser.cpp", 2018, "a Scalar argument is read")
NONZERO = aten("cuda/Nonzero.cu", 214, "memcpy_and_sync of the count")
EXPAND = aten("IndexingUtils.h", 55, "a mask on the device becomes nonzero()")
SELECTED = aten("cuda/IndexKernel.cpp", 43, "masked_select indexes by the mask")
COPY = aten("cuda/Copy.cu", 488, "memcpy_and_sync of a blocking copy")
PAGEABLE = aten("cuda/Copy.cu", 468, "cudaMemcpyAsync, which stages pageable memory")
TEMPORARY = aten("cuda/Copy.cu", 370, "not contiguous: copied through pageable memory")
TENSOR = line("torch/csrc/utils/tensor_new.cpp", 465, "built on the host, then to(device)")
HOST_INDEX = aten("IndexingUtils.h", 61, "index.to(device), blocking")
VALUE = aten("TensorAdvancedIndexing.cpp", 981, "value.to(device), blocking")
ELEMENT = line("aten/src/ATen/TensorIndexing.h", 425, "dst.copy_(src) where sizes are equal")
WHERE_VALUE = aten("TensorCompare.cpp", 618, "other.to(device), blocking")
UNIQUE = aten("cuda/UniqueCub.cu", 121, "length.item()")
UNIQUE_COUNTS = aten("cuda/UniqueCub.cu", 130, "length.item()")
UNIQUE_DIM = aten("cuda/Unique.cu", 73, "thrust::unique returns its end")
REPEATS = aten("Repeat.h", 35, "cumsum[-1].item()")
REPEATS_SIGN = aten("Repeat.h", 37, "(repeats >= 0).all().item()")
BINS_LOW = aten("cuda/SummaryOps.cu", 267, "min().cpu()")
BINS_HIGH = aten("cuda/SummaryOps.cu", 277, "max().item()")
HISTOGRAM = aten("cuda/SummaryOps.cu", 330, "min and max are read")
ONE_HOT = aten("Onehot.cpp", 56, "max().item()")
EQUAL = aten("cuda/Equal.cpp", 45, "all().item()")
ALLCLOSE = aten("TensorCompare.cpp", 334, "all().item()")
FILL_VALUE = aten("cuda/Indexing.cu", 1867, "value.item()")
STD = aten("DistributionTemplates.h", 195, "std.min().ge(0).item()")
VALID = line("torch/distributions/distribution.py", 76, "if not all true, per parameter")
SAMPLE = line("torch/distributions/distribution.py", 323, "if not all true, of the sample")
FOUND_INF = line("torch/amp/grad_scaler.py", 371, "found_inf.item() per device")
CHECK = aten("BatchLinearAlgebra.cpp", 1583, "infos.any().item()")

# What does not wait.
ELEMENTWISE = aten("cuda/CUDALoops.cuh", 332, "launches a kernel and returns")
REDUCTION = aten("cuda/Reduce.cuh", 930, "launches a kernel and returns")
HOST_SCALAR = aten("cuda/Loops.cuh", 203, "a 0-dim tensor of the host becomes an argument")
TOPK = aten("cuda/TensorTopK.cu", 424, "launches a kernel and returns")
SORT = aten("cuda/Sort.cu", 81, "launches a kernel and returns")
SCAN = aten("cuda/ScanUtils.cuh", 463, "a scan, queued")
SCATTER = aten("cuda/ScatterGatherKernel.cu", 115, "launches a kernel and returns")
INDEX_KERNEL = aten("cuda/IndexKernel.cu", 52, "launches a kernel and returns")
ACCUMULATE = aten("cuda/Indexing.cu", 733, "launches a kernel and returns")
MASKED_FILL = aten("cuda/Indexing.cu", 1788, "a kernel for each element")
FILL_PATH = aten("TensorAdvancedIndexing.cpp", 975, "becomes masked_fill_ with a number")
MASKED_SCATTER = aten("cuda/IndexKernel.cpp", 79, "a running sum of the mask on the device")
WHERE = aten("cuda/TensorCompare.cu", 15, "a kernel for each element")
STATIC = aten("cuda/Nonzero.cu", 297, "the size is given; only kernels follow")
HOST_MASK = aten("IndexingUtils.h", 53, "nonzero on the host, pinned, not blocking")
FILL = aten("cuda/FillKernel.cu", 22, "a kernel for each element")
RANGE = aten("cuda/RangeFactories.cu", 52, "a kernel for each element")
FOREACH = aten("cuda/MultiTensorApply.cuh", 201, "launches a kernel and returns")
FUSED = aten("cuda/fused_adam_impl.cu", 42, "launches a kernel and returns")
EMBEDDING = aten("cuda/Embedding.cu", 273, "launches a kernel and returns")
LOSS = aten("cuda/Loss.cu", 319, "launches a kernel and returns")
SOFTMAX = aten("cuda/PersistentSoftmax.cuh", 333, "launches a kernel and returns")
DROPOUT = aten("cuda/Dropout.cu", 273, "launches a kernel and returns")
NORMALIZATION = aten("cuda/Normalization.cuh", 720, "launches a kernel and returns")
LAYER_NORM = aten("cuda/layer_norm_kernel.cu", 883, "launches a kernel and returns")
ATTENTION = aten("transformers/cuda/attention.cu", 111, "launches a kernel and returns")
RECURRENT = aten("cudnn/RNN.cpp", 1628, "a call of cuDNN, queued")
SEARCH = aten("cuda/Bucketization.cu", 106, "launches a kernel and returns")
RANDOM = aten("cuda/DistributionTemplates.h", 145, "launches a kernel and returns")
ASSERT_ASYNC = aten("cuda/TensorCompare.cu", 108, "checked by a kernel")
QUEUED = aten("cuda/Copy.cu", 468, "cudaMemcpyAsync from pinned memory")
EMPTY = aten("Copy.cpp", 280, "nothing to copy")
SAME_DEVICE = aten("TensorConversions.cpp", 435, "to() of what is there already returns it")
ON_DEVICE = aten("cuda/Copy.cu", 433, "a copy inside the device, queued")
UNBIND = aten("TensorShape.cpp", 4367, "views, from the shape alone")
SHAPE = line("c10/core/TensorImpl.h", 913, "sizes are on the host")
PINNED_RESULT = aten("TensorConversions.cpp", 346, "the copy's result is pinned")
CLIP = line("torch/nn/utils/clip_grad.py", 166, "the factor is clamped, not looked at")
FILLED_ELEMENT = filled(501, "dst.fill_(src) with a Python number")
FILLED_POSITIONS = filled(751, "index_fill_ with a Python number")
SLICE_FILL = line("aten/src/ATen/TensorIndexing.h", 428, "filled with the number")
