// What Python calls of the device.

#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device.h"
#include "generator.h"
#include "waits.h"

namespace py = pybind11;

namespace {

// Lets go of a Python function from any thread; at the end of the process it is left alone.
std::shared_ptr<py::function> shared(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            if (!Py_IsInitialized()) return;
            py::gil_scoped_acquire acquired;
            delete held;
          }};
}

c10::intrusive_ptr<sim::SimCcl> make_backend(py::function connect, int rank, int size) {
  auto call = [function = shared(std::move(connect))](const std::string& name, const std::vector<int>& ranks) {
    py::gil_scoped_acquire acquired;
    return (*function)(name, ranks).cast<sim::SimCcl::BackendPtr>();
  };
  return c10::make_intrusive<sim::SimCcl>(call, rank, size);
}

// Occupies the current stream, as a kernel that computes for that long; for ever below 0.
void sleep_on_stream(double milliseconds) {
  sim::launch(sim::current_stream(-1), [milliseconds] {
    sim::Spinning spinning;
    sim::Marker().wait_for(std::chrono::milliseconds(milliseconds < 0 ? int64_t(1) << 40 : int64_t(milliseconds)));
  });
}

// A tensor of the device in memory of the host, as one in another process's memory is.
at::Tensor in_host_memory(const at::Tensor& host, int index) {
  TORCH_CHECK_VALUE(host.is_cpu() && host.is_contiguous(), "memory of the host in C order is taken, got ", host.toString());
  return at::for_blob(host.data_ptr(), host.sizes())
      .deleter([host](void*) {})
      .options(host.options().device(c10::Device(sim::kType, c10::DeviceIndex(index))))
      .target_device(c10::Device(sim::kType, c10::DeviceIndex(index)))
      .make_tensor();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");

  module.def("configure", [](int num_devices, uint64_t seed, double delay_us, bool nonblocking) {
    TORCH_CHECK_VALUE(0 < num_devices && num_devices <= sim::kMaxDevices, "1 to ", sim::kMaxDevices, " devices, got ", num_devices);
    sim::configure({num_devices, seed, delay_us, nonblocking});
  });
  module.def("device_count", [] { return sim::settings().num_devices; });
  module.def("current_device", [] { return int(sim::current_device()); });
  module.def("set_device", [](int index) { sim::set_device(c10::DeviceIndex(index)); });
  module.def("default_generator", [](int index) { return sim::default_generator(c10::DeviceIndex(index)); });
  module.def("is_forked", &sim::is_forked);
  module.def("leave", &sim::leave);
  module.def("in_host_memory", &in_host_memory);
  module.def("sleep", &sleep_on_stream);
  module.def("take_implicit_waits", &sim::take_implicit_waits);
  module.def("forbid_implicit_waits", &sim::forbid_implicit_waits);

  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<sim::SimCcl, c10d::Backend, c10::intrusive_ptr<sim::SimCcl>>(module, "SimCcl")
      .def(py::init(&make_backend))
      .def("get_error", &sim::SimCcl::getError, Released())
      .def("_is_initialized", &sim::SimCcl::is_initialized, Released())
      .def_static("_group_start", &sim::SimCcl::group_start)
      .def_static("_group_end", &sim::SimCcl::group_end, Released());
}
