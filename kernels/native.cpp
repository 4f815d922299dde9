// Looks at thousands of tensors in one call. Python takes some 65 ns for each attribute of each
// tensor (4,000 small parameters: 6 ms a step), this some 30 ns for all of them. What `look` means
// is said by its Python twin, Watch.look in megaopt/state/watch.py. And products, by product.h.
//
// Nothing here holds a Python object that may refer to others: the garbage collector would not see
// it. The objects to compare with come in with each call.

#include <ATen/TensorIterator.h>
#include <c10/core/impl/COWDeleter.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>
#include <torch/extension.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "products/product.h"

namespace {

using Addresses = py::array_t<std::int64_t, py::array::c_style>;

constexpr c10::DispatchKeySet not_plain({c10::DispatchKey::Python, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

// Sizes of many tensors, one behind the other: a vector each would be one more thing to wait for.
class Shapes {
 public:
  Shapes(const std::vector<std::vector<std::int64_t>>& shapes) {
    for (const auto& shape : shapes) {
      sizes_.insert(sizes_.end(), shape.begin(), shape.end());
      ends_.push_back(sizes_.size());
    }
  }

  bool has(at::IntArrayRef found, std::size_t place) const {
    const std::size_t begin = ends_[place], count = ends_[place + 1] - begin;
    if (found.size() != count) return false;
    for (std::size_t i = 0; i < count; ++i) {  // too few for a call of memcmp
      if (found[i] != sizes_[begin + i]) return false;
    }
    return true;
  }

 private:
  std::vector<std::int64_t> sizes_;
  std::vector<std::size_t> ends_{0};
};

using Sizes = std::vector<std::vector<std::int64_t>>;

// Guards in watch.py
struct Guards {
  Guards(std::vector<std::int64_t> positions, std::vector<py::str> names,
         std::vector<at::ScalarType> dtypes, const std::vector<std::optional<Sizes>>& scales,
         const Sizes& shapes, std::vector<at::Device> devices, bool contiguous,
         std::vector<Addresses> addresses, bool sharded)
      : positions(std::move(positions)),
        names(std::move(names)),
        dtypes(std::move(dtypes)),
        scales(scales.begin(), scales.end()),
        shapes(shapes),
        devices(std::move(devices)),
        contiguous(contiguous),
        addresses(std::move(addresses)),
        sharded(sharded) {}

  std::vector<std::int64_t> positions;
  std::vector<py::str> names;
  std::vector<at::ScalarType> dtypes;
  std::vector<std::optional<Shapes>> scales;
  Shapes shapes;
  std::vector<at::Device> devices;
  bool contiguous;
  std::vector<Addresses> addresses;
  bool sharded;

  bool fits(const at::Tensor& tensor, std::size_t slot, std::size_t place) const {
    // what has no memory of its own, or another sign than its memory; weights may be fp8 wrappers
    if (slot != 1 && tensor.key_set().has_any(not_plain)) return false;
    if (tensor.layout() != at::kStrided || tensor.scalar_type() != dtypes[slot]) return false;
    if (tensor.device() != devices[slot] || (contiguous && !tensor.is_contiguous())) return false;
    return (scales[slot] ? *scales[slot] : shapes).has(tensor.sizes(), place);
  }
};

py::object owned(PyObject* found) {
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

bool same_params(const py::object& groups, const py::tuple& params,
                 const std::vector<std::int64_t>& sizes) {
  static PyObject* const name = PyUnicode_InternFromString("params");
  const py::object all = owned(PySequence_Fast(groups.ptr(), "param_groups are no sequence"));
  if (PySequence_Fast_GET_SIZE(all.ptr()) != static_cast<Py_ssize_t>(sizes.size())) return false;
  Py_ssize_t position = 0;
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    PyObject* const group = PySequence_Fast_GET_ITEM(all.ptr(), index);
    const py::object content = owned(PyObject_GetItem(group, name));
    const py::object own = owned(PySequence_Fast(content.ptr(), "a group's params are no sequence"));
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(own.ptr());
    if (size != sizes[index]) return false;
    for (Py_ssize_t place = 0; place < size; ++place, ++position) {
      PyObject* const param = PySequence_Fast_GET_ITEM(own.ptr(), place);
      if (param != PyTuple_GET_ITEM(params.ptr(), position)) return false;
    }
  }
  return true;
}

bool same_items(const py::dict& state, const py::tuple& keys, const py::tuple& values) {
  if (state.size() != keys.size()) return false;
  Py_ssize_t next = 0, place = 0;
  PyObject *key, *value;
  while (PyDict_Next(state.ptr(), &next, &key, &value)) {
    if (key != PyTuple_GET_ITEM(keys.ptr(), place)) return false;
    if (value != PyTuple_GET_ITEM(values.ptr(), place++)) return false;
  }
  return true;
}

// The gradients as Python sees them, attributes of the parameters, where anybody's code may say what
// these are; nothing where all parameters are plain tensors with their own gradients, for which no
// Python objects need be made.
std::optional<py::list> grads_of(const py::tuple& params, bool decoupled) {
  static PyObject* const names[] = {PyUnicode_InternFromString("grad"),
                                    PyUnicode_InternFromString("decoupled_grad")};
  bool plain = !decoupled;
  for (const py::handle param : params) plain = plain && THPVariable_CheckExact(param.ptr());
  if (plain) return std::nullopt;
  py::list grads(params.size());
  for (std::size_t position = 0; position < params.size(); ++position) {
    PyObject* const param = PyTuple_GET_ITEM(params.ptr(), position);
    PyObject* grad = nullptr;
    if (PyObject_GetOptionalAttr(param, names[decoupled], &grad) < 0) throw py::error_already_set();
    PyList_SET_ITEM(grads.ptr(), position, grad == nullptr ? Py_NewRef(Py_None) : grad);
  }
  return grads;
}

// What a look looks at, all kept alive by the caller.
struct Things {
  const py::tuple& params;
  const py::tuple& states;
  const std::optional<py::list>& grads;

  PyObject* param(std::size_t position) const { return PyTuple_GET_ITEM(params.ptr(), position); }
  PyObject* state(std::size_t position) const { return PyTuple_GET_ITEM(states.ptr(), position); }

  // nullptr where it is no tensor; a tensor that is not defined where there is none
  const at::Tensor* grad(std::size_t position) const {
    static const at::Tensor undefined;
    // not Tensor::grad, which looks for what it has to warn of
    if (!grads) return &THPVariable_Unpack(param(position)).unsafeGetTensorImpl()->grad();
    PyObject* const grad = PyList_GET_ITEM(grads->ptr(), position);
    if (grad == Py_None) return &undefined;
    return THPVariable_Check(grad) ? &THPVariable_Unpack(grad) : nullptr;
  }
};

// What tells DTensors and their shards, all as in watch.py: the class, same_sharding, waited.
struct Sharding {
  py::object kind, same, waited;

  bool is_wrapped(PyObject* object) const {
    return PyType_Check(kind.ptr()) &&
           PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(kind.ptr()));
  }

  // The shard, or a plain tensor itself; nothing where a shard is no plain tensor.
  std::optional<py::object> shard(PyObject* object) const {
    static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
    const bool wrapped = is_wrapped(object);
    py::object found = wrapped ? owned(PyObject_GetAttr(object, name))
                               : py::reinterpret_borrow<py::object>(object);
    if (!THPVariable_CheckExact(found.ptr())) found = waited(found);
    if (wrapped && !THPVariable_CheckExact(found.ptr())) return std::nullopt;
    return found;
  }

  // same_sharding in dtensor.py, of DTensors without a call of Python
  bool are_alike(PyObject* grad, PyObject* param) const {
    static PyObject* const name = PyUnicode_InternFromString("_spec");
    static PyObject* const names[] = {PyUnicode_InternFromString("placements"),
                                      PyUnicode_InternFromString("mesh"),
                                      PyUnicode_InternFromString("shard_order")};
    if (!is_wrapped(grad)) return py::cast<bool>(same(py::handle(grad), py::handle(param)));
    const py::object one = owned(PyObject_GetAttr(grad, name));
    const py::object other = owned(PyObject_GetAttr(param, name));
    if (one.is(other)) return true;  // FSDP2 gives every gradient its parameter's
    if (one.is_none() || other.is_none()) return false;
    for (PyObject* const fact : names) {
      const py::object left = optional(one, fact), right = optional(other, fact);
      const int equal = PyObject_RichCompareBool(left.ptr(), right.ptr(), Py_EQ);
      if (equal < 0) throw py::error_already_set();
      if (!equal) return false;
    }
    return true;
  }

 private:
  // An attribute, None where there is none.
  static py::object optional(const py::object& of, PyObject* name) {
    PyObject* found = nullptr;
    if (PyObject_GetOptionalAttr(of.ptr(), name, &found) < 0) throw py::error_already_set();
    return found == nullptr ? py::none() : py::reinterpret_steal<py::object>(found);
  }
};

// shards_of in watch.py: lists by slot; nothing where something is not split as its parameter is.
std::optional<py::list> shards_of(const Guards& guards, const Things& things,
                                  const Sharding& sharding) {
  const std::size_t count = guards.positions.size(), slots = guards.dtypes.size();
  py::list found(slots);
  for (std::size_t slot = 0; slot < slots; ++slot) {
    py::list shards(count);
    for (std::size_t place = 0; place < count; ++place) {
      const std::size_t position = guards.positions[place];
      PyObject* const param = things.param(position);
      PyObject* object = param;
      if (slot == 0) object = PyList_GET_ITEM(things.grads->ptr(), position);
      if (slot > 1) {
        PyObject* const name = guards.names[slot - 2].ptr();
        object = PyDict_GetItemWithError(things.state(position), name);
        if (object == nullptr && PyErr_Occurred()) throw py::error_already_set();
        if (object == nullptr) return std::nullopt;
      }
      // what Python calls may drop it from where it was found
      const auto held = py::reinterpret_borrow<py::object>(object);
      if (sharding.is_wrapped(object) != sharding.is_wrapped(param)) return std::nullopt;
      if (slot == 0 && !sharding.are_alike(object, param)) return std::nullopt;
      const std::optional<py::object> shard = sharding.shard(object);
      if (!shard || !THPVariable_Check(shard->ptr())) return std::nullopt;
      PyList_SET_ITEM(shards.ptr(), place, Py_NewRef(shard->ptr()));
    }
    found[slot] = std::move(shards);
  }
  return found;
}

// Starts the loading of a cache line.
void prefetch(const void* object, std::size_t offset = 0) {
  __builtin_prefetch(static_cast<const char*>(object) + offset);
}

void prefetch_impl(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  prefetch(impl, 16);  // its storage
  prefetch(impl, 64);  // its sizes
  prefetch(impl, sizeof(c10::TensorImpl) - 12);  // dtype, device, flags
}

// Where a tensor lies; nothing where it takes torch to tell. Reads one cache line of the storage.
std::optional<std::int64_t> address(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  c10::StorageImpl* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || impl->numel() == 0) return std::nullopt;
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  // shared until it is written to: torch makes the copy
  if (data.get_deleter() == c10::impl::cow::cow_deleter) return std::nullopt;
  const auto start = reinterpret_cast<std::int64_t>(data.get());
  if (start == 0) return std::nullopt;
  return start + static_cast<std::int64_t>(impl->itemsize()) * impl->storage_offset();
}

// A tensor is scattered over memory: a Python object, what it is, where its elements are. Waiting
// for one after the other would be nearly all of what a look takes. So it goes by stages, each of
// which sends for what the next one reads, of another parameter APART places behind.
class Looker {
 public:
  Looker(Guards& guards, const Things& things)
      : guards_(guards), things_(things), slots_(guards.dtypes.size()) {
    for (Addresses& row : guards.addresses) {
      TORCH_CHECK(row.size() == static_cast<py::ssize_t>(guards.positions.size()));
      rows_.push_back(row.mutable_data());
    }
    tensors_.resize(slots_ * KEPT);
    values_.resize(slots_ * KEPT);
  }

  bool moved = false, elsewhere = false;  // any tensor; a weight

  // false where something does not fit
  bool look() {
    const std::size_t count = guards_.positions.size();
    for (std::size_t next = 0; next < count + 5 * APART; ++next) {
      const auto place = [next](std::size_t stage) { return next - stage * APART; };
      // the places before the first are large numbers, too
      if (place(0) < count) send_for_objects(place(0));
      if (place(1) < count && !send_for_weight(place(1))) return false;
      if (place(2) < count && !find_values(place(2))) return false;
      if (place(3) < count && !find_tensors(place(3))) return false;
      if (place(4) < count) send_for_storages(place(4));
      if (place(5) < count && !fit_and_note(place(5))) return false;
    }
    return true;
  }

  // The same of the shards of DTensors.
  bool look(const py::list& shards) {
    for (std::size_t slot = 0; slot < slots_; ++slot) {
      PyObject* const own = PyList_GET_ITEM(shards.ptr(), slot);
      for (std::size_t place = 0; place < guards_.positions.size(); ++place) {
        const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(own, place));
        if (!guards_.fits(tensor, slot, place)) return false;
        note(tensor, slot, place);
      }
    }
    return true;
  }

 private:
  static constexpr std::size_t APART = 2, KEPT = 16;
  static_assert(KEPT > 4 * APART);  // from the second stage to the last

  std::size_t position(std::size_t place) const { return guards_.positions[place]; }
  PyObject** values(std::size_t place) { return &values_[place % KEPT * slots_]; }
  const at::Tensor** tensors(std::size_t place) { return &tensors_[place % KEPT * slots_]; }

  void send_for_objects(std::size_t place) const {
    prefetch(things_.param(position(place)), 16);
    prefetch(things_.state(position(place)), offsetof(PyDictObject, ma_keys));
  }

  bool send_for_weight(std::size_t place) {
    PyObject* const param = things_.param(position(place));
    if (!THPVariable_Check(param)) return false;
    tensors(place)[1] = &THPVariable_Unpack(param);
    prefetch_impl(*tensors(place)[1]);
    const auto* const keys = reinterpret_cast<PyDictObject*>(things_.state(position(place)))->ma_keys;
    prefetch(keys);
    prefetch(keys, 64);
    return true;
  }

  bool find_values(std::size_t place) {
    prefetch(tensors(place)[1]->unsafeGetTensorImpl()->autograd_meta());
    for (std::size_t slot = 2; slot < slots_; ++slot) {
      PyObject* const name = guards_.names[slot - 2].ptr();
      PyObject* const value = PyDict_GetItemWithError(things_.state(position(place)), name);
      if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
      if (value == nullptr) return false;
      prefetch(value, 16);
      values(place)[slot] = value;
    }
    return true;
  }

  bool find_tensors(std::size_t place) {
    tensors(place)[0] = things_.grad(position(place));
    if (tensors(place)[0] == nullptr || !tensors(place)[0]->defined()) return false;
    prefetch_impl(*tensors(place)[0]);
    for (std::size_t slot = 2; slot < slots_; ++slot) {
      PyObject* const value = values(place)[slot];
      if (!THPVariable_Check(value)) return false;
      tensors(place)[slot] = &THPVariable_Unpack(value);
      prefetch_impl(*tensors(place)[slot]);
    }
    return true;
  }

  void send_for_storages(std::size_t place) {
    for (std::size_t slot = 0; slot < slots_; ++slot) {
      const c10::Storage& storage = tensors(place)[slot]->unsafeGetTensorImpl()->unsafe_storage();
      prefetch(storage.unsafeGetStorageImpl(), 16);
    }
  }

  bool fit_and_note(std::size_t place) {
    for (std::size_t slot = 0; slot < slots_; ++slot) {
      const at::Tensor& tensor = *tensors(place)[slot];
      if (!guards_.fits(tensor, slot, place)) return false;
      note(tensor, slot, place);
    }
    return true;
  }

  void note(const at::Tensor& tensor, std::size_t slot, std::size_t place) {
    if (rows_.empty()) return;
    if (rows_[slot][place] == address(tensor)) return;
    // for a tensor that lies elsewhere than noted everything that torch itself would check
    const auto now = reinterpret_cast<std::int64_t>(tensor.mutable_data_ptr());
    if (rows_[slot][place] == now) return;
    moved = true;
    elsewhere = elsewhere || slot == 1;
    rows_[slot][place] = now;
  }

  Guards& guards_;
  const Things& things_;
  std::size_t slots_;
  std::vector<std::int64_t*> rows_;
  std::vector<PyObject*> values_;
  std::vector<const at::Tensor*> tensors_;
};

const c10::TensorImpl& impl_at(const py::list& tensors, std::size_t place) {
  const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors.ptr(), place));
  return *tensor.unsafeGetTensorImpl();
}

// Places of the tensors whose version is not the one noted.
std::vector<std::size_t> written_of(const py::list& tensors, const Addresses& noted) {
  TORCH_CHECK(noted.size() == static_cast<py::ssize_t>(tensors.size()));
  std::vector<std::size_t> written;
  const std::int64_t* const row = noted.data();
  for (std::size_t place = 0; place < tensors.size(); ++place) {
    if (impl_at(tensors, place).version_counter().current_version() != row[place]) {
      written.push_back(place);
    }
  }
  return written;
}

// Seen in watch.py, the gradients only if they are Python objects; None where the batches have to be
// made anew. states has an entry for each parameter: None for those that had no gradient.
std::optional<py::tuple> look(const std::vector<Guards*>& batches, const py::tuple& params,
                              const std::vector<std::int64_t>& sizes, const py::tuple& states,
                              const py::tuple& keys, const py::tuple& values,
                              const py::object& groups, const py::object& state, bool decoupled,
                              const py::list& counted, const Addresses& noted,
                              const py::tuple& sharding) {
  TORCH_CHECK(states.size() == params.size() && keys.size() == values.size());
  if (!PyDict_Check(state.ptr()) || !same_params(groups, params, sizes)) return std::nullopt;
  if (!same_items(py::reinterpret_borrow<py::dict>(state), keys, values)) return std::nullopt;
  const std::optional<py::list> grads = grads_of(params, decoupled);
  const Things things{params, states, grads};
  for (std::size_t position = 0; position < params.size(); ++position) {
    if (PyTuple_GET_ITEM(states.ptr(), position) != Py_None) continue;
    const at::Tensor* const grad = things.grad(position);
    if (grad == nullptr || grad->defined()) return std::nullopt;
  }
  std::vector<bool> moved;
  bool elsewhere = false;
  py::list shards;
  for (Guards* batch : batches) {
    Looker looker(*batch, things);
    if (batch->sharded) {
      TORCH_CHECK(grads && sharding.size() == 3);
      const auto own = shards_of(*batch, things, {sharding[0], sharding[1], sharding[2]});
      if (!own || !looker.look(*own)) return std::nullopt;
      shards.append(*own);
    } else {
      if (!looker.look()) return std::nullopt;
      shards.append(py::none());
    }
    moved.push_back(looker.moved);
    elsewhere = elsewhere || looker.elsewhere;
  }
  return py::make_tuple(moved, elsewhere, written_of(counted, noted), grads, shards);
}

// Kinds in looks.py; a place without a tensor has no number of elements
struct Kinds {
  Kinds(std::vector<std::optional<std::int64_t>> numels, std::vector<at::ScalarType> dtypes,
        std::vector<at::Device> devices)
      : numels(std::move(numels)), dtypes(std::move(dtypes)), devices(std::move(devices)) {}

  std::vector<std::optional<std::int64_t>> numels;
  std::vector<at::ScalarType> dtypes;
  std::vector<at::Device> devices;

  bool fits(PyObject* object, std::size_t place) const {
    if (!numels[place]) return object == Py_None;
    if (!THPVariable_Check(object)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
    if (tensor.numel() != *numels[place] || tensor.scalar_type() != dtypes[place]) return false;
    return tensor.device() == devices[place];
  }
};

// Sends for what a look at a list's tensors reads, as Looker does.
void send_ahead(const py::list& tensors, std::size_t place) {
  const auto tensor_at = [&](std::size_t ahead) -> const at::Tensor* {
    if (place + ahead >= tensors.size()) return nullptr;
    PyObject* const object = PyList_GET_ITEM(tensors.ptr(), place + ahead);
    return THPVariable_Check(object) ? &THPVariable_Unpack(object) : nullptr;
  };
  if (place + 9 < tensors.size()) prefetch(PyList_GET_ITEM(tensors.ptr(), place + 9));
  if (const at::Tensor* const tensor = tensor_at(6)) prefetch_impl(*tensor);
  if (const at::Tensor* const tensor = tensor_at(3)) {
    prefetch(tensor->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), 16);
  }
}

// Looked in looks.py, but for the addresses; None where a tensor is of another kind.
std::optional<py::tuple> look_at(const Kinds& kinds, const py::list& tensors, Addresses& addresses,
                                 Addresses& versions) {
  const std::size_t count = kinds.numels.size();
  TORCH_CHECK(addresses.size() == static_cast<py::ssize_t>(count));
  TORCH_CHECK(versions.size() == static_cast<py::ssize_t>(count));
  if (tensors.size() != count) return std::nullopt;
  bool in_order = true;
  std::vector<std::size_t> moved, written;
  std::int64_t *const at = addresses.mutable_data(), *const noted = versions.mutable_data();
  for (std::size_t place = 0; place < count; ++place) {
    send_ahead(tensors, place);
    PyObject* const object = PyList_GET_ITEM(tensors.ptr(), place);
    if (!kinds.fits(object, place)) return std::nullopt;
    if (object == Py_None) continue;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    in_order = in_order && tensor.is_contiguous() && !tensor.key_set().has_any(not_plain);
    if (at[place] != address(tensor)) {
      const auto now = reinterpret_cast<std::int64_t>(tensor.mutable_data_ptr());
      if (at[place] != now) moved.push_back(place);
      at[place] = now;
    }
    const std::int64_t version =
        tensor.is_inference() ? 0 : impl_at(tensors, place).version_counter().current_version();
    if (noted[place] != version) written.push_back(place);
    noted[place] = version;
  }
  return py::make_tuple(in_order, moved, written);
}

// Where tensors begin.
Addresses addresses_of(const py::list& tensors) {
  Addresses found(static_cast<py::ssize_t>(tensors.size()));
  std::int64_t* row = found.mutable_data();
  for (const py::handle object : tensors) {
    TORCH_CHECK(THPVariable_Check(object.ptr()));
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    const auto noted = address(tensor);
    *row++ = noted ? *noted : reinterpret_cast<std::int64_t>(tensor.mutable_data_ptr());
  }
  return found;
}

// Whether the entries of a state, and what is in them, are the same objects.
bool same_states(const py::dict& state, const py::tuple& keys, const py::tuple& entries,
                 const py::tuple& values) {
  if (!same_items(state, keys, entries)) return false;
  std::size_t place = 0;
  for (const py::handle entry : entries) {
    Py_ssize_t next = 0;
    PyObject *key, *value;
    while (PyDict_Next(entry.ptr(), &next, &key, &value)) {
      if (place == values.size() || value != PyTuple_GET_ITEM(values.ptr(), place)) return false;
      ++place;
    }
  }
  return place == values.size();
}

// Counts each tensor's version up, and notes it.
void count_versions_up(const py::list& tensors, Addresses& noted) {
  std::int64_t* const row = noted.mutable_data();
  for (std::size_t place = 0; place < tensors.size(); ++place) {
    auto& counter = const_cast<c10::VariableVersion&>(impl_at(tensors, place).version_counter());
    counter.bump();
    row[place] = counter.current_version();
  }
}

// On torch's threads, which only torch's own code can reach without OpenMP here.
template <typename Part>
void on_threads(std::int64_t count, std::int64_t grain, const Part& part) {
  const at::Tensor places = at::arange(count, at::kLong);
  at::TensorIterator::borrowing_nullary_op(places).for_each(
      [&part](char** data, const std::int64_t*, std::int64_t length) {
        const std::int64_t begin = *reinterpret_cast<const std::int64_t*>(data[0]);
        part(begin, begin + length);
      },
      grain);
}

product::Matrix matrix(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 2 && tensor.scalar_type() == at::kFloat && tensor.is_cpu());
  return {tensor.const_data_ptr<float>(), tensor.stride(0), tensor.stride(1)};
}

constexpr std::int64_t ALONE = 1 << 25;  // products of two numbers

// Adds left @ right to fp32 totals, of numbers of a type that has blocks of so many terms, and at
// least that exponent.
void add_product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& totals,
                 int terms, int least) {
  const std::int64_t m = left.size(0), k = left.size(1), n = right.size(1);
  TORCH_CHECK(right.size(0) == k && totals.sizes() == at::IntArrayRef({m, n}));
  TORCH_CHECK(totals.is_contiguous() && totals.is_cpu());
  product::Product own(matrix(left), matrix(right), totals.mutable_data_ptr<float>(), m, k, n,
                       terms, least);
  // below some 5 ms other threads are not waited for: where others compute, that took 80 ms
  if (m * k * n < ALONE) {
    own.run([](std::int64_t count, std::int64_t, const auto& part) { part(0, count); });
  } else {
    own.run([](auto... of) { on_threads(of...); });
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Guards>(module, "Guards")
      .def(py::init<std::vector<std::int64_t>, std::vector<py::str>, std::vector<at::ScalarType>,
                    std::vector<std::optional<Sizes>>, Sizes, std::vector<at::Device>, bool,
                    std::vector<Addresses>, bool>());
  py::class_<Kinds>(module, "Kinds")
      .def(py::init<std::vector<std::optional<std::int64_t>>, std::vector<at::ScalarType>,
                    std::vector<at::Device>>());
  module.def("look", &look);
  module.def("has_callbacks", &at::hasCallbacks);
  module.def("look_at", &look_at);
  module.def("addresses_of", &addresses_of);
  module.def("same_params", &same_params);
  module.def("same_states", &same_states);
  module.def("count_versions_up", &count_versions_up);
  module.def("add_product", &add_product, py::call_guard<py::gil_scoped_release>());
}
