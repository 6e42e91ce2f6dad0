#include "server/rpc/head_source.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/head/paths.h"
#include "server/rpc/errors.h"

namespace lossd::rpc {
namespace {

// Where a parameter's tensor name stands in the request.
struct Wanted {
  kernels::Param param;
  absl::string_view field;
  const std::string& name;
  bool required;
};

absl::StatusOr<kernels::DType> ElementType(const formats::SafetensorsInfo& info, absl::string_view field) {
  if (info.dtype_name == "F32") return kernels::DType::kFloat32;
  if (info.dtype_name == "F16") return kernels::DType::kFloat16;
  if (info.dtype_name == "BF16") return kernels::DType::kBFloat16;
  return FieldError(field, "name a tensor of type F32, F16 or BF16", info.dtype_name);
}

std::vector<int64_t> WantedShape(const kernels::HeadConfig& config, kernels::Param param) {
  const kernels::TensorShape shape = kernels::ShapeOf(config, param);
  if (param == kernels::Param::kWeight) return {shape.rows, shape.cols};
  return {shape.rows};
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

}  // namespace

absl::StatusOr<HeadSource> HeadSource::Open(const std::string& directory, const v1::TensorFile& file,
                                            const kernels::HeadConfig& config) {
  const absl::StatusOr<std::string> path = head::ResolveBelow(directory, file.path());
  if (!path.ok()) {
    return absl::Status(path.status().code(), absl::StrCat("tensor_file.path: ", path.status().message()));
  }
  absl::StatusOr<std::unique_ptr<formats::SafetensorsReader>> reader =
      formats::SafetensorsReader::Open(*path);
  if (!reader.ok()) return FieldError("tensor_file.path", "be a readable safetensors file", file.path());
  HeadSource source;
  source.reader_ = *std::move(reader);
  const Wanted all[] = {
      {kernels::Param::kWeight, "tensor_file.weight", file.weight(), true},
      {kernels::Param::kBias, "tensor_file.bias", file.bias(), true},
      {kernels::Param::kNormGain, "tensor_file.norm_gain", file.norm_gain(), true},
      {kernels::Param::kNormShift, "tensor_file.norm_shift", file.norm_shift(), true},
      {kernels::Param::kClassWeights, "tensor_file.class_weights", file.class_weights(), false}};
  for (const Wanted& wanted : all) {
    const bool stored = kernels::HasTensor(config, {wanted.param, kernels::Role::kValue});
    if (!stored && !wanted.name.empty()) {
      return FieldError(wanted.field, "be empty for a head without this tensor", wanted.name);
    }
    if (!stored || (wanted.name.empty() && !wanted.required)) continue;
    if (wanted.name.empty()) return FieldError(wanted.field, "name a tensor for this head", "nothing");
    const absl::StatusOr<const formats::SafetensorsInfo*> info = source.reader_->Find(wanted.name);
    if (!info.ok()) {
      return FieldError(wanted.field, "name a tensor in the file", wanted.name, absl::StatusCode::kNotFound);
    }
    const std::vector<int64_t> shape = WantedShape(config, wanted.param);
    if ((*info)->shape != shape) {
      return FieldError(wanted.field, absl::StrCat("name a tensor of shape ", ShapeText(shape)),
                        ShapeText((*info)->shape));
    }
    const absl::StatusOr<kernels::DType> dtype = ElementType(**info, wanted.field);
    if (!dtype.ok()) return dtype.status();
    source.tensors_.push_back({wanted.param, *dtype, *info});
  }
  return source;
}

}  // namespace lossd::rpc
