"""Triton's interpreter without three detours, to the same results.

They take half of a small step's time. For each sum and product of integers it finds out whether it
overflows, which it then tells only where options.debug is set: it is not. For each launch, and each
function within it, it looks through all names of triton.language for those to replace. For each
operation it makes all dtypes of numpy. Where a release has other names all stays as it is.
"""

import dataclasses
import inspect


def make_faster():
    """To be called before anything is launched."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        patch_attr, is_builtin = interpreter._patch_attr, tl.core.is_builtin
        slow_dtype, _ = interpreter._get_np_dtype, interpreter._patch_builtin
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
        packages = [tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base]
    except (ImportError, AttributeError, TypeError):
        return
    builder.options = options
    names = {each: [n for n, m in inspect.getmembers(each) if is_builtin(m)] for each in packages}
    dtypes = {}

    def patch_builtin(package, own_builder, scope):
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # not within another function, which has replaced it
                patch_attr(package, name, member, own_builder, scope)

    def dtype_of(own):
        scalar = own.scalar
        if scalar.is_ptr():
            return slow_dtype(scalar)
        if scalar not in dtypes:
            dtypes[scalar] = slow_dtype(scalar)
        return dtypes[scalar]

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, dtype_of
