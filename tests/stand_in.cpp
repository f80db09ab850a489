// A device that computes on the host: tensors of `stand_in` have memory of their own as far as torch knows.
//
// What a GPU is strict about, it is strict about: tensors of two devices in one operation are an error, and so is the
// address of host memory among the lists of a fused kernel. Copies that nobody waits for, to the host or in a stream beside
// that of the computation, are made when somebody waits for their stream: until then their target holds something else,
// and they read what the source holds then. Autocast casts what CUDA's does, as far as the tests need it.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, c10::DeviceType);
} // namespace at::autocast

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kCount = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream = 0;
constexpr size_t kMemory = 1ull << 30;

struct Copies {
  std::deque<std::function<void()>> begun;
  uint64_t done = 0;
};
std::map<c10::StreamId, Copies> streams;
std::recursive_mutex guard_streams;

struct Event {
  c10::StreamId stream;
  uint64_t last;
};

// Make the copies of a stream up to one of them.
void make_copies(c10::StreamId stream, uint64_t last = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> guard(guard_streams);
  auto& copies = streams[stream];
  while (!copies.begun.empty() && copies.done < last) {
    auto copy = std::move(copies.begun.front());
    copies.begun.pop_front();
    copies.done++;
    copy();
  }
}

void begin_copy(std::function<void()> copy) {
  std::lock_guard<std::recursive_mutex> guard(guard_streams);
  streams[current_stream].begun.push_back(std::move(copy));
}

uint64_t last_copy(c10::StreamId stream) {
  std::lock_guard<std::recursive_mutex> guard(guard_streams);
  return streams[stream].done + streams[stream].begun.size();
}

void wait_for_device() {
  std::lock_guard<std::recursive_mutex> guard(guard_streams);
  for (auto& each : streams) make_copies(each.first);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= kMemory, "stand_in out of memory. Tried to allocate ", bytes, " bytes");
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, c10::Device(kDevice, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) { return {kMemory, kMemory}; }
};
Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(1); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(1); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = {on.id(), last_copy(on.id())};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream&) const override { synchronizeEvent(event); }
  bool queryEvent(void* event) const override {
    auto* recorded = static_cast<Event*>(event);
    return !recorded || streams[recorded->stream].done >= recorded->last;
  }
  bool queryStream(const c10::Stream& on) const override { return streams[on.id()].begun.empty(); }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void synchronizeStream(const c10::Stream& on) const override { make_copies(on.id()); }
  void synchronizeEvent(void* event) const override {
    if (auto* recorded = static_cast<Event*>(event)) make_copies(recorded->stream, recorded->last);
  }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for_device(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};
struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} registered;

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current_device)));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current_device)));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::CPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto copy = [from, to] { on_host(to).copy_(on_host(from)); };
  if (non_blocking && (to.device().is_cpu() || current_stream)) {
    // Memory that was freed may hold the values.
    if (to.is_contiguous()) std::memset(to.data_ptr(), 0xff, to.nbytes());
    begin_copy(copy);
    return to;
  }
  if (!non_blocking) make_copies(current_stream);
  copy();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  make_copies(current_stream);
  return on_host(tensor).item();
}

void require_device(const c10::OperatorHandle& op, bool is_here) {
  TORCH_CHECK(
      is_here, op.schema().name(),
      ": expected all tensors to be on the same device, but found at least two devices, stand_in and cpu");
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined()) {
      const auto& tensor = value.toTensor();
      require_device(op, tensor.device().type() == kDevice || tensor.dim() == 0);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        require_device(op, !tensor.defined() || tensor.device().type() == kDevice);
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

// Whoever keeps a copy keeps its tensors here, whose memory is not given away before it was made.
void record_stream(at::Tensor&, c10::Stream) {}

void cast_arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard cast_already(c10::DispatchKey::AutocastPrivateUse1);
  for (auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor() && value.toTensor().defined()) {
      const_cast<c10::IValue&>(value) = at::autocast::cached_cast(dtype, value.toTensor(), kDevice);
    }
  }
  op.callBoxed(stack);
}

void lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_arguments(op, stack, at::autocast::get_autocast_dtype(kDevice));
}

void raise(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_arguments(op, stack, at::kFloat); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower>());
  }
  for (auto name : {"mse_loss", "cross_entropy_loss", "nll_loss", "softmax.int", "log_softmax.int", "pow.Tensor_Scalar"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&raise>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

} // namespace
