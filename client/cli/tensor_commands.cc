// SPDX-License-Identifier: Apache-2.0
// The commands read, write and add-grad.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/options.h"
#include "client/cli/tensor_io.h"
#include "client/cli/value_checks.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

struct TensorFlags {
  std::string head;
  v1::Param param = v1::PARAM_WEIGHT;
  v1::Role role = v1::ROLE_VALUE;
  RowsOption rows;
  v1::DType dtype = v1::DTYPE_FP32;
  std::string out;   // read
  std::string file;  // write, add-grad
  // add-grad
  std::optional<uint64_t> step;
  uint64_t id = 0;
  std::optional<float> scale;
};

// The shape of the whole tensor, and which rows of it are meant.
struct Extent {
  uint64_t cols = 1;
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t rows() const { return end - begin; }
  std::vector<int64_t> Shape(v1::Param param) const {
    std::vector<int64_t> shape = {static_cast<int64_t>(rows())};
    if (param == v1::PARAM_WEIGHT) shape.push_back(static_cast<int64_t>(cols));
    return shape;
  }
};

absl::StatusOr<Extent> ExtentOf(const TensorFlags& flags, client::Client& client, absl::Duration timeout) {
  const absl::StatusOr<v1::HeadDescription> head = client.DescribeHead(flags.head, timeout);
  if (!head.ok()) return head.status();
  const v1::HeadSpec& spec = head->spec();
  const bool by_class = flags.param == v1::PARAM_WEIGHT || flags.param == v1::PARAM_BIAS ||
                        flags.param == v1::PARAM_CLASS_WEIGHTS;
  const uint64_t rows = by_class ? spec.vocab_size() : spec.hidden_size();
  Extent extent{flags.param == v1::PARAM_WEIGHT ? spec.hidden_size() : 1, flags.rows.begin.value_or(0),
                flags.rows.end.value_or(rows)};
  if (extent.begin > extent.end || extent.end > rows) {
    const std::string given = absl::StrCat(extent.begin, ":", extent.end);
    const std::string problem = absl::StrCat("is outside the tensor's ", rows, " rows");
    return errors::WithViolation(absl::InvalidArgumentError(absl::StrCat("--rows ", given, " ", problem)),
                                 {"--rows", problem, given});
  }
  return extent;
}

struct Statistics {
  double smallest = 0, largest = 0, mean = 0, norm = 0;
  uint64_t not_finite = 0;
};

Statistics StatisticsOf(absl::Span<const float> values) {
  Statistics statistics;
  double sum = 0, squares = 0;
  uint64_t finite = 0;
  for (double value : values) {
    if (!std::isfinite(value)) {
      ++statistics.not_finite;
      continue;
    }
    statistics.smallest = finite == 0 ? value : std::min(statistics.smallest, value);
    statistics.largest = finite == 0 ? value : std::max(statistics.largest, value);
    sum += value;
    squares += value * value;
    ++finite;
  }
  statistics.mean = finite > 0 ? sum / static_cast<double>(finite) : 0;
  statistics.norm = std::sqrt(squares);
  return statistics;
}

void PrintRead(const Context& context, const TensorFlags& flags, const Extent& extent,
               const Statistics& statistics) {
  const std::vector<int64_t> shape = extent.Shape(flags.param);
  if (context.json) {
    nlohmann::ordered_json json = {{"head", flags.head},
                                   {"param", NameOf(Params(), flags.param)},
                                   {"role", NameOf(Roles(), flags.role)},
                                   {"rows", {{"begin", extent.begin}, {"end", extent.end}}},
                                   {"shape", shape},
                                   {"min", statistics.smallest},
                                   {"max", statistics.largest},
                                   {"mean", statistics.mean},
                                   {"norm", statistics.norm},
                                   {"not_finite", statistics.not_finite}};
    if (!flags.out.empty()) json["file"] = flags.out;
    context.PrintJson(json);
    return;
  }
  FieldList fields;
  fields.Add("tensor",
             absl::StrCat(flags.head, " ", NameOf(Params(), flags.param), " ", NameOf(Roles(), flags.role)));
  fields.Add("shape", absl::StrJoin(shape, " x "));
  fields.Add("smallest", absl::StrFormat("%.6g", statistics.smallest));
  fields.Add("largest", absl::StrFormat("%.6g", statistics.largest));
  fields.Add("mean", absl::StrFormat("%.6g", statistics.mean));
  fields.Add("2-norm", absl::StrFormat("%.6g", statistics.norm));
  if (statistics.not_finite > 0) fields.Add("not finite", HumanCount(statistics.not_finite));
  if (!flags.out.empty()) fields.Add("written to", flags.out);
  context.Print(fields.ToString());
}

absl::Status RunRead(Context* context, const TensorFlags& flags, client::Client& client) {
  if (!flags.out.empty()) {
    absl::Status status = CheckOutputPath(flags.out, 1);
    if (!status.ok()) return status;
  }
  const absl::StatusOr<Extent> extent = ExtentOf(flags, client, context->timeout());
  if (!extent.ok()) return extent.status();
  v1::ReadTensorRequest request;
  request.set_head(flags.head);
  request.set_param(flags.param);
  request.set_role(flags.role);
  request.mutable_rows()->set_begin(extent->begin);
  request.mutable_rows()->set_end(extent->end);
  request.set_dtype(flags.dtype);
  TensorData tensor{FileDType(flags.dtype), extent->Shape(flags.param), {}};
  tensor.bytes.resize(extent->rows() * extent->cols * client::ElementSize(flags.dtype));
  const auto bytes = absl::MakeSpan(reinterpret_cast<char*>(tensor.bytes.data()), tensor.bytes.size());
  const absl::StatusOr<client::TensorShape> read = client.ReadTensor(request, bytes, context->timeout());
  if (!read.ok()) return read.status();
  const absl::StatusOr<std::vector<uint8_t>> values = ConvertTo(v1::DTYPE_FP32, tensor);
  if (!values.ok()) return values.status();
  const Statistics statistics = StatisticsOf(
      absl::MakeConstSpan(reinterpret_cast<const float*>(values->data()), values->size() / sizeof(float)));
  if (!flags.out.empty()) {
    const std::string name = absl::StrCat(
        NameOf(Params(), flags.param), flags.role == v1::ROLE_VALUE ? "" : "." + NameOf(Roles(), flags.role));
    absl::Status status = SaveTensors(flags.out, {{name, std::move(tensor)}});
    if (!status.ok()) return status;
  }
  PrintRead(*context, flags, *extent, statistics);
  return absl::OkStatus();
}

// The rows of a file, as they travel.
struct Payload {
  v1::DType dtype = v1::DTYPE_FP32;
  std::vector<uint8_t> bytes;

  absl::Span<const char> span() const { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
};

// The file has exactly the rows of `extent`.
absl::StatusOr<Payload> LoadPayload(const TensorFlags& flags, const Extent& extent) {
  const absl::StatusOr<TensorData> tensor = LoadTensor(flags.file);
  if (!tensor.ok()) return tensor.status();
  if (tensor->shape != extent.Shape(flags.param)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.file, " has the shape [", absl::StrJoin(tensor->shape, ", "),
                     "], but the rows have [", absl::StrJoin(extent.Shape(flags.param), ", "), "]"));
  }
  Payload payload;
  const v1::DType stored = WireDType(tensor->dtype);
  if (stored != v1::DTYPE_UNSPECIFIED) payload.dtype = stored;
  absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(payload.dtype, *tensor);
  if (!bytes.ok())
    return absl::InvalidArgumentError(absl::StrCat(flags.file, ": ", bytes.status().message()));
  payload.bytes = *std::move(bytes);
  return payload;
}

absl::Status RunWrite(Context* context, const TensorFlags& flags, client::Client& client) {
  const absl::StatusOr<Extent> extent = ExtentOf(flags, client, context->timeout());
  if (!extent.ok()) return extent.status();
  const absl::StatusOr<Payload> payload = LoadPayload(flags, *extent);
  if (!payload.ok()) return payload.status();
  v1::OpenTensor open;
  open.set_head(flags.head);
  open.set_param(flags.param);
  open.set_role(flags.role);
  open.mutable_rows()->set_begin(extent->begin);
  open.mutable_rows()->set_end(extent->end);
  open.set_dtype(payload->dtype);
  const absl::StatusOr<v1::WriteTensorResponse> written =
      client.WriteTensor(open, payload->span(), context->timeout());
  if (!written.ok()) return written.status();
  if (context->json) {
    nlohmann::ordered_json json = ToJson(written->state());
    json["rows"] = {{"begin", written->rows().begin()}, {"end", written->rows().end()}};
    context->PrintJson(json);
    return absl::OkStatus();
  }
  context->Print(absl::StrCat("wrote rows [", written->rows().begin(), ", ", written->rows().end(), ") of ",
                              flags.head, " ", NameOf(Params(), flags.param), " ",
                              NameOf(Roles(), flags.role), "\n"));
  return absl::OkStatus();
}

absl::Status RunAddGradient(Context* context, const TensorFlags& flags, client::Client& client) {
  const absl::StatusOr<Extent> extent = ExtentOf(flags, client, context->timeout());
  if (!extent.ok()) return extent.status();
  const absl::StatusOr<Payload> payload = LoadPayload(flags, *extent);
  if (!payload.ok()) return payload.status();
  const absl::StatusOr<uint64_t> step = StepOf(context, flags.head, flags.step, client);
  if (!step.ok()) return step.status();
  v1::OpenGradient open;
  open.set_head(flags.head);
  open.set_step(*step);
  open.set_contribution_id(flags.id);
  open.set_param(flags.param);
  open.mutable_rows()->set_begin(extent->begin);
  open.mutable_rows()->set_end(extent->end);
  open.set_dtype(payload->dtype);
  if (flags.scale.has_value()) open.set_scale(*flags.scale);
  const absl::StatusOr<v1::AddGradientResponse> added =
      client.AddGradient(open, payload->span(), context->timeout());
  if (!added.ok()) return added.status();
  if (context->json) {
    nlohmann::ordered_json json = ToJson(added->state());
    json["rows"] = {{"begin", added->rows().begin()}, {"end", added->rows().end()}};
    json["added_rows"] = added->added_rows();
    json["repeated_rows"] = added->repeated_rows();
    context->PrintJson(json);
    return absl::OkStatus();
  }
  context->Print(absl::StrCat("added ", HumanCount(added->added_rows()), " rows to the gradient of ",
                              flags.head, " ", NameOf(Params(), flags.param), " in step ",
                              HumanCount(added->state().step()), ", ", HumanCount(added->repeated_rows()),
                              " were there before\n"));
  return absl::OkStatus();
}

void AddCommonOptions(CLI::App* command, TensorFlags* flags) {
  AddHead(command, &flags->head);
  AddWord(command, "PARAM", &flags->param, Params(), "Which parameter")->required();
  AddRows(command, &flags->rows);
}

void AddRole(CLI::App* command, TensorFlags* flags) {
  AddWord(command, "--role", &flags->role, Roles(), "What is stored of it [value]");
}

void AddFile(CLI::App* command, TensorFlags* flags) {
  command->add_option("FILE", flags->file, "FILE.npy, FILE.safetensors or FILE.safetensors:TENSOR")
      ->required()
      ->type_name("");
}

}  // namespace

void AddTensorCommands(CLI::App* app, Context* context) {
  auto flags = std::make_shared<TensorFlags>();
  CLI::App* read = app->add_subcommand("read", "Sum up a tensor, or write it to a file");
  AddCommonOptions(read, flags.get());
  AddRole(read, flags.get());
  AddWord(read, "--dtype", &flags->dtype, DTypes(), "Element type to transfer [fp32]");
  read->add_option("--out", flags->out, "File to write: .npy or .safetensors")->type_name("FILE");
  SetClientAction(read, context, [=](client::Client& client) { return RunRead(context, *flags, client); });

  CLI::App* write = app->add_subcommand("write", "Replace a tensor's values by those of a file");
  AddCommonOptions(write, flags.get());
  AddRole(write, flags.get());
  AddFile(write, flags.get());
  SetClientAction(write, context, [=](client::Client& client) { return RunWrite(context, *flags, client); });

  CLI::App* add =
      app->add_subcommand("add-grad", "Add a file's values to the gradient of the open step, once");
  AddCommonOptions(add, flags.get());
  AddFile(add, flags.get());
  add->add_option("--id", flags->id, "Names the contribution; no microbatch of the step has it")->required();
  add->add_option("--step", flags->step, "Must be open [whichever is]");
  add->add_option("--scale", flags->scale, "Multiplies the values [1]");
  SetClientAction(add, context,
                  [=](client::Client& client) { return RunAddGradient(context, *flags, client); });
}

}  // namespace lossd::cli
