// read, write
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
#include "client/cli/names.h"
#include "client/cli/options.h"
#include "client/cli/tensor_io.h"

namespace lossd::cli {
namespace {

struct TensorFlags {
  std::string head;
  v1::Param param = v1::PARAM_WEIGHT;
  v1::Role role = v1::ROLE_VALUE;
  RowsOption rows;
  v1::DType dtype = v1::DTYPE_FP32;
  std::string out;   // read
  std::string file;  // write
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
    return absl::InvalidArgumentError(
        absl::StrCat("--rows ", extent.begin, ":", extent.end, " is outside the tensor's ", rows, " rows"));
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

absl::Status RunWrite(Context* context, const TensorFlags& flags, client::Client& client) {
  const absl::StatusOr<TensorData> tensor = LoadTensor(flags.file);
  if (!tensor.ok()) return tensor.status();
  const absl::StatusOr<Extent> extent = ExtentOf(flags, client, context->timeout());
  if (!extent.ok()) return extent.status();
  if (tensor->shape != extent->Shape(flags.param)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.file, " has the shape [", absl::StrJoin(tensor->shape, ", "),
                     "], but the rows have [", absl::StrJoin(extent->Shape(flags.param), ", "), "]"));
  }
  const v1::DType stored = WireDType(tensor->dtype);
  v1::OpenTensor open;
  open.set_head(flags.head);
  open.set_param(flags.param);
  open.set_role(flags.role);
  open.mutable_rows()->set_begin(extent->begin);
  open.mutable_rows()->set_end(extent->end);
  open.set_dtype(stored == v1::DTYPE_UNSPECIFIED ? v1::DTYPE_FP32 : stored);
  const absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(open.dtype(), *tensor);
  if (!bytes.ok())
    return absl::InvalidArgumentError(absl::StrCat(flags.file, ": ", bytes.status().message()));
  const absl::StatusOr<v1::WriteTensorResponse> written = client.WriteTensor(
      open, absl::MakeConstSpan(reinterpret_cast<const char*>(bytes->data()), bytes->size()),
      context->timeout());
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

void AddCommonOptions(CLI::App* command, TensorFlags* flags) {
  AddHead(command, &flags->head);
  AddWord(command, "PARAM", &flags->param, Params(), "Which parameter")->required();
  AddWord(command, "--role", &flags->role, Roles(), "What is stored of it [value]");
  AddRows(command, &flags->rows);
}

}  // namespace

void AddTensorCommands(CLI::App* app, Context* context) {
  auto flags = std::make_shared<TensorFlags>();
  CLI::App* read = app->add_subcommand("read", "Sum up a tensor, or write it to a file");
  AddCommonOptions(read, flags.get());
  AddWord(read, "--dtype", &flags->dtype, DTypes(), "Element type to transfer [fp32]");
  read->add_option("--out", flags->out, "File to write: .npy or .safetensors")->type_name("FILE");
  SetClientAction(read, context, [=](client::Client& client) { return RunRead(context, *flags, client); });

  CLI::App* write = app->add_subcommand("write", "Replace a tensor's values by those of a file");
  AddCommonOptions(write, flags.get());
  write->add_option("FILE", flags->file, "FILE.npy, FILE.safetensors or FILE.safetensors:TENSOR")
      ->required()
      ->type_name("");
  SetClientAction(write, context, [=](client::Client& client) { return RunWrite(context, *flags, client); });
}

}  // namespace lossd::cli
