// A device "sim" for tests of what is meant for GPUs, on machines that have none: memory of its own, which is counted,
// storages that can be resized, views, a thread of autograd's for each device. Operators compute by the CPU's kernels,
// in place, and refuse tensors of different devices as CUDA does.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_dimI_native.h>
#include <ATen/ops/_dimV_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

thread_local c10::DeviceIndex current_device = 0;
std::array<std::atomic<int64_t>, kDevices> allocated{};
std::array<std::atomic<int64_t>, kDevices> most{};

struct Block {
  void* data;
  size_t nbytes;
  c10::DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->device] -= static_cast<int64_t>(block->nbytes);
  std::free(block->data);
  delete block;
}

struct SimAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto device = current_device;
    void* data = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&data, 64, nbytes) == 0, "sim: out of memory");
    }
    int64_t now = allocated[device] += static_cast<int64_t>(nbytes);
    int64_t seen = most[device];
    while (seen < now && !most[device].compare_exchange_weak(seen, now)) {
    }
    return {data, new Block{data, nbytes, device}, &free_block, c10::Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* dest, const void* src, size_t count) const override {
    std::memcpy(dest, src, count);
  }
};

SimAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kSim, current_device);
  }
  void setDevice(c10::Device device) const override {
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(at::kCPU);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    c10::DataPtr data = allocator.allocate(nbytes);
    if (nbytes && storage.nbytes()) {
      std::memcpy(data.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

SimHooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// Return a tensor on the CPU that has the memory of one on the device.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kSim) {
    return tensor;
  }
  if (tensor.is_sparse()) {
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    auto made = at::_sparse_coo_tensor_unsafe(
        on_cpu(tensor._indices()), on_cpu(tensor._values()), tensor.sizes(), options.layout(at::kSparse));
    return made._coalesced_(tensor.is_coalesced());
  }
  auto offset = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  auto available = tensor.storage().nbytes();
  // A storage that was given back has no memory: what reads it is a fault, as on a GPU.
  TORCH_CHECK(
      tensor.numel() == 0 || offset < available, "sim: an operator read memory that was given back");
  auto* data = static_cast<char*>(tensor.storage().mutable_data());
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  auto made = at::for_blob(data + offset, tensor.sizes())
                  .strides(tensor.strides())
                  .options(options)
                  .resizeable_storage()  // an output may get another shape
                  .allocator(c10::GetAllocator(at::kCPU))
                  .make_tensor();
  if (tensor.is_conj()) {
    made = made.conj();
  }
  if (tensor.is_neg()) {
    made._set_neg(true);
  }
  return made;
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : c10::Device(kSim, current_device));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : c10::Device(kSim, current_device));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Return a tensor on the device with the values of one on the CPU.
at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU) {
    return tensor;
  }
  if (tensor.is_sparse()) {
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(device).layout(at::kSparse);
    auto made = at::_sparse_coo_tensor_with_dims_and_tensors(
        tensor.sparse_dim(), tensor.dense_dim(), tensor.sizes(), on_device(tensor._indices(), device),
        on_device(tensor._values(), device), options);
    return made._coalesced_(tensor.is_coalesced());
  }
  auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), std::nullopt, device, std::nullopt);
  if (tensor.numel()) {
    on_cpu(made).copy_(tensor);
  }
  return made;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() == size) {
    return self;
  }
  impl->set_sizes_contiguous(size);
  auto needed = static_cast<size_t>((impl->storage_offset() + impl->numel()) * impl->itemsize());
  if (needed > self.storage().nbytes()) {
    hooks.resizePrivateUse1Bytes(self.storage(), needed);
  }
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return on_cpu(self).item();
}

// All other operators: those of the CPU, on the same memory.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  std::optional<c10::Device> device;
  const char* elsewhere = nullptr;
  bool is_sparse = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // on the CPU, as given
  auto convert = [&](const at::Tensor& given) {
    if (!given.defined()) {
      return given;
    }
    if (given.device().type() != kSim) {
      elsewhere = given.dim() ? "the CPU" : elsewhere;
      return given;
    }
    TORCH_CHECK(
        !device || *device == given.device() || !given.dim(), op.schema().name(), " got tensors on ",
        device ? device->str() : "", " and ", given.device().str());
    device = given.device();
    is_sparse = is_sparse || given.is_sparse();
    auto made = on_cpu(given);
    pairs.emplace_back(made, given);
    return made;
  };
  for (auto i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) {
        list.push_back(convert(each));
      }
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
        list.push_back(each ? std::optional<at::Tensor>(convert(*each)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      auto wanted = value.toDevice();
      device = c10::Device(kSim, wanted.has_index() ? wanted.index() : current_device);
      value = c10::Device(at::kCPU);
    }
  }
  if (!device) {
    device = c10::Device(kSim, current_device);
  }
  // Tensors in brackets may be on the CPU, as with CUDA.
  const auto& name = schema.name();
  bool mixes = name == "aten::_to_copy" || name == "aten::index" || name == "aten::_index_put_impl_" ||
      name == "aten::index_put_" || name == "aten::index_put";
  TORCH_CHECK(
      elsewhere == nullptr || mixes, "Expected all tensors to be on the same device, but ", name, " got tensors on ",
      device->str(), " and on ", elsewhere ? elsewhere : "");
  op.redispatchBoxed(
      c10::DispatchKeySet(is_sparse ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU), stack);
  auto back = [&](const at::Tensor& made) -> at::Tensor {
    if (!made.defined()) {
      return made;
    }
    for (const auto& [ours, given] : pairs) {
      if (ours.unsafeGetTensorImpl() == made.unsafeGetTensorImpl()) {
        return given;
      }
    }
    return on_device(made, *device);
  };
  // An output that was given may have been resized, into memory of the CPU.
  for (const auto& [ours, given] : pairs) {
    if (given.is_sparse()) {
      auto* impl = static_cast<at::SparseTensorImpl*>(given.unsafeGetTensorImpl());
      auto changed = on_device(ours, given.device());
      impl->resize_(ours.sparse_dim(), ours.dense_dim(), ours.sizes());
      impl->set_indices_and_values_unsafe(changed._indices(), changed._values());
      impl->set_coalesced(ours.is_coalesced());
    } else if (ours.sizes() != given.sizes()) {
      given.resize_(ours.sizes());
      on_cpu(given).copy_(ours);
    }
  }
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) {
        list.push_back(back(each));
      }
      value = c10::List<at::Tensor>(list);
    }
  }
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  auto own_bias = bias && bias->defined() ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt;
  auto result = at::convolution(
      on_cpu(input), on_cpu(weight), own_bias, stride, padding, dilation, transposed, output_padding, groups);
  return on_device(result, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  auto bias_sizes = at::OptionalIntArrayRef();
  std::vector<int64_t> sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  if (mask[2]) {
    bias_sizes = sizes;
  }
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), bias_sizes, stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto device = input.device();
  return {on_device(of_input, device), on_device(of_weight, device), on_device(of_bias, device)};
}

// As between the CPU and CUDA: p.data = ... moves a parameter.
bool may_become(const at::Tensor& self, const at::Tensor& other) {
  return self.layout() == other.layout();
}

int64_t allocated_nbytes(int64_t device) {
  return allocated.at(device);
}

int64_t peak_nbytes(int64_t device, bool reset) {
  int64_t found = most.at(device);
  if (reset) {
    most.at(device) = allocated.at(device).load();
  }
  return found;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", &may_become);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", [](at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) -> at::Tensor& {
    return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
  });
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_dimI", at::native::sparse_dim_sparse);
  m.impl("_dimV", at::native::dense_dim_sparse);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
}

TORCH_LIBRARY(simulated, m) {
  m.def("allocated_nbytes(int device) -> int", &allocated_nbytes);
  m.def("peak_nbytes(int device, bool reset) -> int", &peak_nbytes);
}

}  // namespace
