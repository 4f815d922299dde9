"""Triton's interpreter, as strict about tensor descriptors as CUDA's cuTensorMapEncodeTiled."""

STRIDE_LIMIT = 2**40
"""Bytes below which every stride is, but for the last dimension's."""
SIZE_LIMIT = 2**32
"""Elements up to which every dimension is."""


def make_strict():
    """To be called before anything is launched.

    The interpreter itself looks at alignment alone: on a card a larger stride is cut off, and reads
    elsewhere.
    """
    try:
        from triton.runtime.interpreter import TensorDescHandle
    except ImportError:
        return
    validate = TensorDescHandle.validate

    def validated(descriptor):
        validate(descriptor)
        itemsize = descriptor.base.dtype.element_ty.primitive_bitwidth // 8
        for stride in descriptor.strides[:-1]:
            size = stride.data.item() * itemsize
            assert 0 <= size < STRIDE_LIMIT, f"a descriptor's stride is {size} bytes"
        for size in descriptor.shape:
            assert 0 < size.data.item() <= SIZE_LIMIT, f"a descriptor's size is {size.data.item()}"

    TensorDescHandle.validate = validated
