// Every operator of torch: shapes are found on the meta device, and the CPU's kernel is enqueued. Where shapes depend on
// values, and where a number is returned, the host waits, as it does on CUDA.

#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "device.h"
#include "generator.h"
#include "memory.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool is_tensor_list(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::ListType &&
      type->containedType(0)->kind() == c10::TypeKind::TensorType;
}

// Calls `visit` for each defined tensor of a value.
template <class Visit>
void for_each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec()) {
      if (tensor && tensor->defined()) visit(*tensor);
    }
  }
}

// Returns a value with each of its tensors replaced, and every device by `device`.
template <class Replace>
IValue replaced(const IValue& value, Replace replace, c10::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec()) {
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(replace(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

Tensor as_meta(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// A kernel takes the value that a tensor of the host has when it is launched.
Tensor as_argument(const Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return as_cpu(tensor);
  return tensor.clone();
}

// Some CPU kernels resize their `out` on the way, which memory that they do not own cannot be.
Tensor as_output(const Tensor& cpu) {
  return at::for_blob(cpu.mutable_data_ptr(), cpu.sizes())
      .strides(cpu.strides())
      .options(cpu.options())
      .resizeable_storage()
      .allocator(c10::GetAllocator(c10::DeviceType::CPU))
      .make_tensor();
}

void copy_values(const IValue& to, const IValue& from) {
  if (to.isTensor()) {
    if (to.toTensor().defined()) to.toTensor().copy_(from.toTensor());
  } else if (to.isTensorList()) {
    auto targets = to.toTensorVector(), sources = from.toTensorVector();
    for (size_t at = 0; at < targets.size(); ++at) targets[at].copy_(sources[at]);
  }
}

// Operators that CUDA gives tensors of the CPU beside its own: it moves indices itself (ATen/native/TensorAdvancedIndexing.cpp).
bool takes_host_tensors(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(op.schema().name()) != 0;
}

Tensor meta_of(at::IntArrayRef sizes, const Tensor& like, at::ScalarType dtype) {
  return at::empty(sizes, like.options().dtype(dtype).device(at::kMeta));
}

// The shapes of a layer norm's results. torch finds them in Python (torch/_refs, torch/_decomp), in milliseconds.
// Nothing where the arguments do not fit each other: torch's error says how.
std::optional<Stack> layer_norm_shapes(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  bool forward = op.schema().name() == "aten::native_layer_norm";
  if (!(forward || op.schema().name() == "aten::native_layer_norm_backward") || op.schema().overload_name() != "") {
    return std::nullopt;
  }
  const auto& input = args[forward ? 0 : 1].toTensor();
  auto shape = args[forward ? 1 : 2].toIntVector();
  std::vector<Tensor> parameters;
  for (size_t at : {forward ? 2 : 5, forward ? 3 : 6}) {
    parameters.push_back(args[at].isTensor() ? args[at].toTensor() : Tensor());
    if (parameters.back().defined() && parameters.back().sizes() != shape) return std::nullopt;
  }
  auto leading = input.dim() - int64_t(shape.size());
  if (shape.empty() || leading < 0 || input.sizes().slice(leading) != shape) return std::nullopt;
  if (forward) {
    auto sizes = input.sizes().vec();
    std::fill(sizes.begin() + leading, sizes.end(), 1);
    auto dtype = at::toOpMathType(input.scalar_type());
    auto mean = meta_of(sizes, input, dtype);
    return Stack{meta_of(input.sizes(), input, input.scalar_type()), mean, at::empty_like(mean)};
  }
  auto wanted = args[7].toBoolList();
  Stack shapes;
  size_t at = 0;
  for (auto& tensor : {input, parameters[0], parameters[1]}) {
    bool given = wanted[at++] && tensor.defined();
    shapes.push_back(given ? meta_of(tensor.sizes(), tensor, tensor.scalar_type()) : Tensor());
  }
  return shapes;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), num_(op.schema().arguments().size()), args_(stack->end() - num_, stack->end()) {
    find_device();
    find_aliases();
  }

  void run() {
    c10::OptionalDeviceGuard guard(device_);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto results = draws_alone() ? draw() : compute();
    torch::jit::drop(*stack_, num_);
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

 private:
  static constexpr int kFresh = -1;

  std::vector<IValue> compute() {
    bool launched = !returns_number_ && take_generator() && find_shapes();
    make_cpu_arguments();
    return launched ? launch_kernel() : run_on_host();
  }

  void find_device() {
    std::optional<c10::Device> found;
    for (auto& arg : args_) {
      for_each_tensor(arg, [&](const Tensor& tensor) {
        if (!tensor.is_privateuseone()) return;
        if (!found) found = tensor.device();
        TORCH_CHECK(*found == tensor.device(), "Expected all tensors to be on the same device, but found at least two "
                    "devices, ", *found, " and ", tensor.device(), "! (", op_.schema().name(), ")");
      });
      if (!found && arg.isDevice() && arg.toDevice().type() == kType) found = arg.toDevice();
    }
    device_ = c10::Device(kType, or_current(found ? found->index() : -1));
    if (!found || takes_host_tensors(op_)) return;
    for (auto& arg : args_) {
      for_each_tensor(arg, [&](const Tensor& tensor) {
        TORCH_CHECK(!tensor.is_cpu() || tensor.dim() == 0, "Expected all tensors to be on the same device, but found at "
                    "least two devices, ", device_, " and cpu! (", op_.schema().name(), ")");
      });
    }
  }

  // Which argument each result is, and whether a result is no tensor.
  void find_aliases() {
    auto& schema = op_.schema();
    for (auto& result : schema.returns()) {
      int alias = kFresh;
      if (auto* info = result.alias_info()) {
        TORCH_CHECK_NOT_IMPLEMENTED(info->isWrite(), "sim has no kernel for the view operator ", schema.operator_name());
        for (size_t at = 0; at < num_; ++at) {
          auto* own = schema.arguments()[at].alias_info();
          if (own && own->isWrite() && own->beforeSets() == info->beforeSets()) alias = int(at);
        }
      }
      aliases_.push_back(alias);
      bool is_tensor = result.type()->kind() == c10::TypeKind::TensorType || is_tensor_list(result.type());
      returns_number_ = returns_number_ || (alias == kFresh && !is_tensor);
    }
  }

  // Whether it fills its one tensor with random numbers that depend on no values.
  bool draws_alone() const {
    static const std::set<std::string> names{
        "aten::normal_", "aten::uniform_", "aten::random_", "aten::random_.from", "aten::random_.to",
        "aten::bernoulli_.float", "aten::exponential_", "aten::randperm.generator_out"};
    return names.count(c10::toString(op_.operator_name())) != 0;
  }

  std::vector<IValue> draw() {
    Tensor target, drawn;
    Stack values;
    for (auto& arg : args_) {
      auto on_cpu = [&](const Tensor& tensor) {
        target = tensor;
        return drawn = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
      };
      values.push_back(replaced(arg, on_cpu, at::kCPU));
    }
    auto [at, given] = given_generator();
    values[at] = on_host(given);
    op_.callBoxed(&values);
    if (target.sizes() != drawn.sizes()) target.resize_(drawn.sizes());
    launch(current_stream(device_.index()), [to = as_cpu(target), drawn] { to.copy_(drawn); });
    return {target};
  }

  // Returns the place of the generator among the arguments, and the one that is used.
  std::pair<size_t, at::Generator> given_generator() const {
    auto& arguments = op_.schema().arguments();
    for (size_t at = 0; at < num_; ++at) {
      if (arguments[at].name() != "generator") continue;
      bool given = args_[at].isGenerator() && args_[at].toGenerator().defined();
      return {at, given ? args_[at].toGenerator() : default_generator(device_.index())};
    }
    return {num_, {}};
  }

  // Gives random operators the generator of this launch; false where an operator takes none.
  bool take_generator() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return true;
    auto [at, given] = given_generator();
    if (at == num_) return false;
    generator_ = {at, for_kernel(given)};
    args_[at] = IValue();
    return true;
  }

  bool needs_shapes() const {
    auto& arguments = op_.schema().arguments();
    for (int alias : aliases_) {
      if (alias == kFresh) return true;
      if (arguments[alias].is_out() && args_[alias].isTensor() && args_[alias].toTensor().numel() == 0) return true;
    }
    return false;
  }

  // Runs the operator on the meta device; false if that cannot give the shapes. An error in the arguments comes again
  // where the CPU's kernel runs on the host.
  bool find_shapes() {
    if (!needs_shapes()) return true;
    if (auto known = layer_norm_shapes(op_, args_)) {
      shapes_ = std::move(*known);
      return true;
    }
    Stack metas;
    for (auto& arg : args_) metas.push_back(replaced(arg, as_meta, at::kMeta));
    auto given = metas;
    try {
      op_.callBoxed(&metas);
    } catch (const std::exception&) {
      return false;
    }
    shapes_ = std::move(metas);
    for (int alias : aliases_) {
      if (alias == kFresh || !op_.schema().arguments()[alias].is_out() || !args_[alias].isTensor()) continue;
      auto out = args_[alias].toTensor();
      auto shape = given[alias].toTensor().sizes();
      if (out.sizes() != shape) out.resize_(shape);
    }
    return true;
  }

  void make_cpu_arguments() {
    for (size_t at = 0; at < num_; ++at) {
      auto value = replaced(args_[at], as_argument, at::kCPU);
      bool is_out = op_.schema().arguments()[at].is_out() && value.isTensor() && value.toTensor().numel() != 0;
      if (is_out) {
        auto own = as_output(value.toTensor());
        outputs_.emplace_back(value.toTensor(), own);
        value = own;
      }
      cpu_->push_back(value);
    }
    if (generator_) (*cpu_)[generator_->first] = generator_->second;
  }

  // Returns what runs the CPU's kernel on the arguments, whose results replace them.
  Kernel kernel() const {
    return [op = op_, cpu = cpu_, outputs = outputs_] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.callBoxed(cpu.get());
      for (auto& [target, own] : outputs) {
        if (target.const_data_ptr() != own.const_data_ptr()) target.copy_(own);
      }
    };
  }

  IValue new_like(const IValue& value) const {
    auto make = [this](const Tensor& like) {
      return at::empty_strided(like.sizes(), like.strides(), like.options().device(device_));
    };
    return replaced(value, make, device_);
  }

  std::vector<IValue> launch_kernel() {
    std::vector<IValue> results;
    std::vector<std::pair<size_t, IValue>> fresh;
    for (size_t at = 0; at < aliases_.size(); ++at) {
      results.push_back(aliases_[at] == kFresh ? new_like(shapes_[at]) : args_[aliases_[at]]);
      if (aliases_[at] == kFresh) fresh.emplace_back(at, replaced(results.back(), as_cpu, at::kCPU));
    }
    launch(current_stream(device_.index()), [run = kernel(), cpu = cpu_, fresh] {
      run();
      for (auto& [at, target] : fresh) copy_values(target, (*cpu)[at]);
    });
    return results;
  }

  std::vector<IValue> run_on_host() {
    auto stream = current_stream(device_.index());
    note_implicit_wait(c10::toString(op_.operator_name()));
    synchronize(stream);
    kernel()();
    std::vector<IValue> results;
    for (size_t at = 0; at < aliases_.size(); ++at) {
      auto& made = (*cpu_)[at];
      results.push_back(aliases_[at] == kFresh ? new_like(made) : args_[aliases_[at]]);
      if (aliases_[at] != kFresh || !(made.isTensor() || made.isTensorList())) continue;
      auto target = replaced(results.back(), as_cpu, at::kCPU);
      enqueue(stream, [target, made] { copy_values(target, made); });
    }
    return results;
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  size_t num_;
  std::vector<IValue> args_;
  c10::Device device_{kType, 0};
  std::vector<int> aliases_;  // of each result
  bool returns_number_ = false;
  std::optional<std::pair<size_t, at::Generator>> generator_;
  Stack shapes_;
  std::shared_ptr<Stack> cpu_ = std::make_shared<Stack>();
  std::vector<std::pair<Tensor, Tensor>> outputs_;
};

void run_operator(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// The meta device, as CUDA, gives a mean in float32 for an input in bfloat16; the CPU's kernel takes it in the dtype of
// the weight (ATen/native/cpu/mixed_data_type.h, param_scalar_type).
void run_layer_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  enum { kInput = 1, kMean = 3, kRstd = 4, kWeight = 5, kNumArguments = 8 };
  auto* args = &stack->at(stack->size() - kNumArguments);
  auto& like = args[kWeight].isTensor() && args[kWeight].toTensor().defined() ? args[kWeight] : args[kInput];
  auto dtype = like.toTensor().scalar_type();
  for (auto at : {kMean, kRstd}) args[at] = args[at].toTensor().to(dtype);
  run_operator(op, stack);
}

// `native_dropout` takes no generator: a mask of `bernoulli_`, which does, is what CUDA's kernel comes to.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) { return grad.mul(mask).mul_(scale); }

}  // namespace

at::Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // Composites on devices without a kernel of their own; CUDA has one.
  for (auto* name : {"native_layer_norm", "native_group_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
  library.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&run_layer_norm_backward>());
  library.impl("native_dropout", &native_dropout);
  library.impl("native_dropout_backward", &native_dropout_backward);
}

}  // namespace sim
