// What Python sees: one submodule per element type, with the same functions and classes.
//
// Classes are local to their module: by default pybind11 knows one class per C++ type in a process, and every variant
// has the same ones.
//
// Tensors come as addresses. Their shapes, dtypes and contiguity are the caller's business (common/model/kernels); so
// is that they outlive the objects which were made from them. The GIL is released while anything computes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "attend.h"
#include "experts.h"
#include "heads.h"
#include "layers.h"
#include "linear.h"
#include "norm.h"
#include "router.h"
#include "slots.h"

namespace py = pybind11;

namespace moerelay {
namespace {

using Address = uintptr_t;
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::vector<const char*> addresses_of(const std::vector<Address>& addresses) {
  std::vector<const char*> found;
  for (Address address : addresses) found.push_back(at<const char>(address));
  return found;
}

// Panels of a [N, K] weight; of a fused [2 F, K] one, gate and up panels in turns.
template <typename T>
void pack(Address weight, int num_outputs, int num_inputs, bool fused, Address to) {
  const int half = fused ? num_outputs / 2 : num_outputs;
  const int num_panels = (half + kLanes - 1) / kLanes, num_parts = fused ? 2 : 1;
  const size_t panel_bytes = PackedWeight<T>{nullptr, num_outputs, num_inputs}.panel_bytes();
  share(num_panels, 4, [&](int panel) {
    for (int part = 0; part < num_parts; ++part) {
      const int count = std::min(kLanes, half - panel * kLanes);
      const T* first = at<const T>(weight) + (int64_t{part} * half + panel * kLanes) * num_inputs;
      pack_panel(rows_of(first, count, num_inputs).data(), count, num_inputs,
                 at<char>(to) + panel_bytes * (size_t(panel) * num_parts + part));
    }
  });
}

template <typename T, typename W>
struct Router {
  PackedWeight<W> weight;
  const W* bias;
  RouterRules rules;

  void operator()(const T* x, int num_tokens, int32_t* ids, float* weights, const RowsOut& rows) const {
    route(rules, weight, bias, x, num_tokens, ids, weights, rows);
  }
};

template <typename T, typename W>
void bind_router(py::module_& module, const char* name) {
  using Bound = Router<T, W>;
  py::class_<Bound>(module, name, py::module_local())
      .def(py::init([](Address weight, int num_experts, int hidden, Address bias, Address correction, int scoring,
                       bool normalize, float normalize_eps, float scale, int top_k, int num_groups, int num_groups_kept,
                       int num_group_scores) {
             return Bound{{at<const char>(weight), num_experts, hidden},
                          at<const W>(bias),
                          {Scoring(scoring), normalize, normalize_eps, scale, top_k, num_groups, num_groups_kept,
                           num_group_scores, at<const float>(correction)}};
           }),
           py::kw_only(), py::arg("weight"), py::arg("num_experts"), py::arg("hidden"), py::arg("bias"),
           py::arg("correction"), py::arg("scoring"), py::arg("normalize"), py::arg("normalize_eps"), py::arg("scale"),
           py::arg("top_k"), py::arg("num_groups"), py::arg("num_groups_kept"), py::arg("num_group_scores"))
      .def(
          "__call__",
          [](const Bound& router, Address x, int num_tokens, Address ids, Address weights, Address rows,
             int64_t row_bytes, int id_bytes) {
            router(at<const T>(x), num_tokens, at<int32_t>(ids), at<float>(weights),
                   RowsOut{at<uint8_t>(rows), row_bytes, id_bytes});
          },
          Unlocked());
}

// The layers one after the other, and then everything in one call.
template <typename T>
class Layers {
 public:
  explicit Layers(float eps) : eps_(eps) {}

  template <typename W>
  void add(Address input_norm, Address feed_forward_norm, const Linear<T>& qkv, const Heads<T>& heads,
           const Linear<T>& out, int64_t window, Address sinks, const Router<T, W>& router, const Experts<T>& experts) {
    layers_.push_back({at<const T>(input_norm), at<const T>(feed_forward_norm), qkv, heads, out, window,
                       at<const float>(sinks), router, router.rules.top_k, experts});
  }

  void operator()(int num_tokens, Address positions, Address slots, Address cos, Address sin, int block_size,
                  Address block_table, Address sequences, int num_sequences, Address kv, int64_t plane_elements,
                  Address rows, int64_t row_bytes, int id_bytes, int64_t layer_row_bytes, Address x) const {
    Pass<T> pass{num_tokens,
                 at<const int64_t>(positions),
                 at<const int64_t>(slots),
                 at<const float>(cos),
                 at<const float>(sin),
                 __builtin_ctz(block_size),
                 at<const int32_t>(block_table),
                 at<const Queries>(sequences),
                 num_sequences,
                 at<T>(kv),
                 plane_elements,
                 RowsOut{at<uint8_t>(rows), row_bytes, id_bytes},
                 layer_row_bytes};
    run_layers(layers_, eps_, pass, at<T>(x));
  }

 private:
  float eps_;
  std::vector<Layer<T>> layers_;
};

template <typename T>
void bind_layers(py::module_& module) {
  auto bound = py::class_<Layers<T>>(module, "Layers", py::module_local()).def(py::init<float>());
  bound.def("add", &Layers<T>::template add<T>);
  if constexpr (!std::is_same_v<T, float>) bound.def("add", &Layers<T>::template add<float>);
  bound.def("__call__", &Layers<T>::operator(), Unlocked());
}

template <typename T>
void bind_experts(py::module_& module) {
  py::class_<Experts<T>>(module, "Experts", py::module_local())
      .def(py::init([](const std::vector<Address>& gate_up, const std::vector<Address>& down, int hidden, int width,
                       Address gate_bias, Address up_bias, Address down_bias, int activation, float alpha,
                       float limit) {
             return Experts<T>{addresses_of(gate_up), addresses_of(down),      hidden,
                               width,                 at<const T>(gate_bias),  at<const T>(up_bias),
                               at<const T>(down_bias), Activation(activation), alpha,
                               limit};
           }),
           py::kw_only(), py::arg("gate_up"), py::arg("down"), py::arg("hidden"), py::arg("width"),
           py::arg("gate_bias"), py::arg("up_bias"), py::arg("down_bias"), py::arg("activation"), py::arg("alpha"),
           py::arg("limit"))
      .def(
          "__call__",
          [](const Experts<T>& experts, Address x, Address ids, Address weights, int num_tokens, int top_k, Address y) {
            apply_experts(experts, at<const T>(x), at<const int32_t>(ids), at<const float>(weights), num_tokens, top_k,
                          at<T>(y));
          },
          Unlocked());
}

template <typename T>
void bind_heads(py::module_& module) {
  py::class_<Heads<T>>(module, "Heads", py::module_local())
      .def(py::init([](int num_heads, int num_kv_heads, int dim, int rotary_dim, int norm, Address norm_weight,
                       float eps, float bound, float scale) {
             return Heads<T>{num_heads, num_kv_heads, dim,   rotary_dim, HeadNorm(norm), at<const float>(norm_weight),
                             eps,       bound,        scale, nullptr,    nullptr};
           }),
           py::kw_only(), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("dim"), py::arg("rotary_dim"),
           py::arg("norm"), py::arg("norm_weight"), py::arg("eps"), py::arg("bound"), py::arg("scale"))
      .def(
          "__call__",
          [](const Heads<T>& heads, Address fused, Address cos, Address sin, Address positions, Address slots,
             int num_tokens, Address q, Address keys, Address values) {
            Heads<T> turned = heads;
            turned.cos = at<const float>(cos);
            turned.sin = at<const float>(sin);
            split_heads(turned, at<const T>(fused), at<const int64_t>(positions), at<const int64_t>(slots), num_tokens,
                        at<T>(q), at<T>(keys), at<T>(values));
          },
          Unlocked());
}

template <typename T>
void attend_all(int num_heads, int num_kv_heads, int key_dim, int value_dim, int block_size, int64_t window,
                Address sinks, Address q, Address keys, Address values, Address block_table, Address sequences,
                int num_sequences, Address out) {
  Attention<T> attention{num_heads,
                         num_kv_heads,
                         key_dim,
                         value_dim,
                         __builtin_ctz(block_size),
                         window,
                         at<const float>(sinks),
                         at<const T>(q),
                         at<const T>(keys),
                         at<const T>(values),
                         at<const int32_t>(block_table),
                         at<T>(out)};
  attend(attention, at<const Queries>(sequences), num_sequences);
}

template <typename T>
void bind(py::module_ module) {
  module.def("pack", &pack<T>, Unlocked());
  module.def(
      "add_norm",
      [](Address x, Address delta, Address weight, float eps, int num_rows, int size, Address to) {
        add_norm(at<T>(x), at<const T>(delta), at<const T>(weight), eps, num_rows, size, at<T>(to));
      },
      Unlocked());
  module.def("attend", &attend_all<T>, Unlocked());
  py::class_<Linear<T>>(module, "Linear", py::module_local())
      .def(py::init([](Address weight, int num_outputs, int num_inputs, Address bias) {
             return Linear<T>{{at<const char>(weight), num_outputs, num_inputs}, at<const T>(bias)};
           }),
           py::kw_only(), py::arg("weight"), py::arg("num_outputs"), py::arg("num_inputs"), py::arg("bias"))
      .def(
          "__call__",
          [](const Linear<T>& bound, Address x, int64_t stride, int num_rows, Address y) {
            linear(at<const T>(x), stride, num_rows, bound.weight, bound.bias, at<T>(y));
          },
          Unlocked());
  bind_experts<T>(module);
  bind_heads<T>(module);
  bind_router<T, T>(module, "Router");
  if constexpr (!std::is_same_v<T, float>) bind_router<T, float>(module, "Fp32Router");
  bind_layers<T>(module);
}

// The bytes of anything with Python's buffer interface, held while it lives.
class Bytes {
 public:
  Bytes(const py::handle& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw py::error_already_set();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  char* data() const { return static_cast<char*>(view_.buf); }
  int64_t size() const { return view_.len; }

 private:
  Py_buffer view_;
};

// Calls `copy` with the slots and the memory, and without the GIL. Raises ValueError if the sizes do not fit.
template <typename Copy>
void with_slots(Address base, int64_t plane_bytes, int num_planes, int64_t slot_bytes, const py::handle& slots,
                const py::handle& memory, bool writable, const Copy& copy) {
  const Bytes numbers(slots, false), bytes(memory, writable);
  const int64_t num_slots = numbers.size() / int64_t{sizeof(int64_t)};
  if (bytes.size() != num_slots * num_planes * slot_bytes)
    throw py::value_error("slots and memory are not of one size");
  const py::gil_scoped_release unlocked;
  copy(Slots{at<char>(base), plane_bytes, num_planes, slot_bytes, reinterpret_cast<const int64_t*>(numbers.data()),
             num_slots},
       bytes.data());
}

void bind_slots(py::module_& module) {
  module.def("gather", [](Address base, int64_t plane_bytes, int num_planes, int64_t slot_bytes, py::handle slots,
                          py::handle to) {
    with_slots(base, plane_bytes, num_planes, slot_bytes, slots, to, true, gather);
  });
  module.def("scatter", [](Address base, int64_t plane_bytes, int num_planes, int64_t slot_bytes, py::handle slots,
                           py::handle from) {
    with_slots(base, plane_bytes, num_planes, slot_bytes, slots, from, false, scatter);
  });
}

}  // namespace
}  // namespace moerelay

PYBIND11_MODULE(MOERELAY_MODULE, module) {
  module.attr("source") = MOERELAY_SOURCE;
  moerelay::bind_slots(module);
  moerelay::bind<moerelay::bf16>(module.def_submodule("bfloat16"));
  moerelay::bind<float>(module.def_submodule("float32"));
}
