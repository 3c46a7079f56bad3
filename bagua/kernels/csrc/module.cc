// The Python module bagua.kernels._minmax_uint8. Its functions take addresses: bagua/kernels/minmax_uint8_native.py has
// checked the tensors and keeps them alive. They release the interpreter's lock while they compute.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "minmax_uint8.h"
#include "range_kernel.h"

namespace py = pybind11;

namespace bagua_kernels {
namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr): Python passes addresses as integers
}

Execution execution(size_t threads, const std::string& instructions) {
  if (instructions.empty()) return {&range_kernel(), threads};
  const RangeKernel* kernel = range_kernel_named(instructions.c_str());
  if (kernel == nullptr) {
    throw py::value_error("this processor or this build has no instructions '" + instructions +
                          "'; known are portable, avx2, avx512 and avx512bf16");
  }
  return {kernel, threads};
}

}  // namespace
}  // namespace bagua_kernels

PYBIND11_MODULE(_minmax_uint8, module) {
  using namespace bagua_kernels;  // NOLINT(google-build-using-namespace)
  module.doc() = "MinMaxUInt8 for memory of the CPU; use bagua.kernels.minmax_uint8";
  module.attr("INSTRUCTIONS") = range_kernel().name;

  module.def(
      "compress",
      [](uintptr_t source, int type, size_t chunks, size_t elements, size_t block, size_t stride, uintptr_t out,
         size_t threads, const std::string& instructions) {
        const Execution how = execution(threads, instructions);
        const py::gil_scoped_release release;
        compress(pointer<const void>(source), static_cast<ElementType>(type), {chunks, elements, block, stride},
                 pointer<uint8_t>(out), how);
      },
      py::arg("source"), py::arg("type"), py::arg("chunks"), py::arg("elements"), py::arg("block"), py::arg("stride"),
      py::arg("out"), py::arg("threads"), py::arg("instructions"));

  module.def(
      "decompress",
      [](uintptr_t compressed, uintptr_t target, int type, bool accumulate, size_t chunks, size_t elements,
         size_t block, size_t stride, size_t threads, const std::string& instructions) {
        const Execution how = execution(threads, instructions);
        const py::gil_scoped_release release;
        decompress(pointer<const uint8_t>(compressed), pointer<void>(target), static_cast<ElementType>(type),
                   accumulate, {chunks, elements, block, stride}, how);
      },
      py::arg("compressed"), py::arg("target"), py::arg("type"), py::arg("accumulate"), py::arg("chunks"),
      py::arg("elements"), py::arg("block"), py::arg("stride"), py::arg("threads"), py::arg("instructions"));

  module.def(
      "decompress_reduce_compress",
      [](uintptr_t received, bool average, size_t versions, size_t elements, size_t block, size_t stride, uintptr_t out,
         size_t threads, const std::string& instructions) {
        const Execution how = execution(threads, instructions);
        const py::gil_scoped_release release;
        decompress_reduce_compress(pointer<const uint8_t>(received), average, {versions, elements, block, stride},
                                   pointer<uint8_t>(out), how);
      },
      py::arg("received"), py::arg("average"), py::arg("versions"), py::arg("elements"), py::arg("block"),
      py::arg("stride"), py::arg("out"), py::arg("threads"), py::arg("instructions"));
}
