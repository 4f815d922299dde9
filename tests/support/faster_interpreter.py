"""Triton's interpreter without its detours, to the same results.

They take two thirds of a small step's time. For each sum and product of integers it finds out
whether it overflows, which it then tells only where options.debug is set: it is not. For each
launch, and each function within it, it looks through all names of triton.language for those to
replace. For each operation it makes all dtypes of numpy, the same shapes, and types again. Where a
release has other names all stays as it is.
"""

import dataclasses
import inspect
import os


def make_faster():
    """To be called once a process, before anything is launched; compilers stay as they are."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        for owner, names in {
            interpreter: ("_patch_lang", "_patch_builtin", "_get_np_dtype", "GridExecutor"),
            interpreter.interpreter_semantic: ("binary_op_type_checking_impl", "scalar_constant"),
            tl.core: ("_unwrap_if_constexpr", "is_builtin", "constexpr", "tensor", "block_type"),
        }.items():
            for name in names:
                getattr(owner, name)
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    except (ImportError, AttributeError, TypeError):
        return
    if getattr(interpreter, "is_faster", False):
        return
    interpreter.is_faster, builder.options = True, options
    patch_names_once(tl, interpreter)
    make_dtypes_once(interpreter)
    make_shapes_once(tl)
    compare_types_first(tl, interpreter.interpreter_semantic)


def patch_names_once(tl, interpreter):
    """A launch replaces names; the functions within it find them replaced, and look no further."""
    packages = [tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base]
    is_builtin, semantic = tl.core.is_builtin, interpreter.interpreter_semantic
    members = {package: inspect.getmembers(package) for package in packages}
    names = {package: [n for n, m in members[package] if is_builtin(m)] for package in packages}
    interpreted = {}

    def interpreted_from(member):
        if member not in interpreted:

            def call(*args, **named):
                named["_semantic"] = semantic
                return member(*args, **named)

            interpreted[member] = call
        return interpreted[member]

    def patch_builtin(package, builder, scope):
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # not within another function, which has replaced it
                scope.set_attr(package, name, interpreted_from(member))

    patch_lang, patched = interpreter._patch_lang, []
    languages = {}

    def patch_unless_patched(function):
        if function not in languages:
            modules = [m for m in function.__globals__.values() if inspect.ismodule(m)]
            languages[function] = {id(m) for m in modules if m in (tl, tl.core)}
        if patched and languages[function] and languages[function] <= patched[-1]:
            return None  # a call within a launch: nobody restores what it replaces
        scope = patch_lang(function)
        patched.append(languages[function])
        restore = scope.restore

        def restore_all():
            patched.pop()
            restore()

        scope.restore = restore_all
        return scope

    def launched(self, *args, **named):
        # a launch within another one's time restores what it has replaced itself
        waiting = patched[:]
        patched.clear()
        try:
            return launch(self, *args, **named)
        finally:
            patched[:] = waiting

    launch = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_unless_patched


def make_dtypes_once(interpreter):
    """numpy's dtype of one of Triton's."""
    slow_dtype, dtypes = interpreter._get_np_dtype, {}

    def dtype_of(dtype):
        scalar = dtype.scalar
        if scalar.is_ptr():
            return slow_dtype(scalar)
        if scalar not in dtypes:
            dtypes[scalar] = slow_dtype(scalar)
        return dtypes[scalar]

    interpreter._get_np_dtype = dtype_of


def make_shapes_once(tl):
    """Shapes and sizes are made once for all tensors and types of one shape."""
    core, shapes, types = tl.core, {}, {}
    init_type, unwrap = core.block_type.__init__, core._unwrap_if_constexpr

    def init_tensor(self, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            slow_init(self, handle, type)
            shapes[shape] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    def init_block_type(self, element_ty, shape):
        key = (element_ty, *shape) if all(type(size) is int for size in shape) else None
        if key is None or element_ty.is_ptr() or key not in types:
            init_type(self, element_ty, shape)
            if key is not None and not element_ty.is_ptr():
                types[key] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def fast_unwrap(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        if kind is int or kind is core.tensor or kind is core.dtype or value is None:
            return value
        return unwrap(value)

    slow_init = core.tensor.__init__
    core.tensor.__init__, core.block_type.__init__ = init_tensor, init_block_type
    core._unwrap_if_constexpr = fast_unwrap


def compare_types_first(tl, semantic):
    """Operands of one type, or a number beside one, whose conversion is no question."""
    check, most = semantic.binary_op_type_checking_impl, 2**31 - 1
    # by identity: types of pointers have no hash
    floats = {id(dtype) for dtype in (tl.float32, tl.float64)}
    plain = floats | {id(dtype) for dtype in (tl.int32, tl.int64, tl.uint32, tl.uint64)}

    def filled(scalar, kind):
        """The tensor of this type with a number, or with that of a tensor of no dimensions."""
        if not isinstance(scalar, tl.tensor):
            scalar = semantic.scalar_constant(scalar, dtype=kind.scalar)
        if not kind.is_block():
            return scalar
        handle = semantic.builder.create_splat(kind.to_ir(semantic.builder), scalar.handle)
        return semantic.tensor(handle, kind)

    def fits(dtype, number):
        kind = type(number)
        return (kind is int and 0 <= number <= most) or (kind is float and id(dtype) in floats)

    def check_unless_alike(lhs, rhs, *args, **named):
        if type(lhs) is tl.tensor and id(lhs.dtype) in plain:
            if type(rhs) is tl.tensor and rhs.dtype is lhs.dtype:
                if lhs.shape is rhs.shape:
                    return lhs, rhs
                if not rhs.type.is_block():
                    return lhs, filled(rhs, lhs.type)
                if not lhs.type.is_block():
                    return filled(lhs, rhs.type), rhs
            elif fits(lhs.dtype, rhs):
                return lhs, filled(rhs, lhs.type)
        elif type(rhs) is tl.tensor and id(rhs.dtype) in plain and fits(rhs.dtype, lhs):
            return filled(lhs, rhs.type), rhs
        return check(lhs, rhs, *args, **named)

    semantic.binary_op_type_checking_impl = check_unless_alike
