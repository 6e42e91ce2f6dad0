// SPDX-License-Identifier: Apache-2.0
#include "client/cli/real_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cli/tensor_io.h"
#include "kernels/data/parallel.h"
#include "kernels/data/real_data.h"

namespace lossd::cli {
namespace {

constexpr int64_t kClassesAtOnce = 8192;

}  // namespace

absl::Status CheckTakesRealRows(const v1::HeadSpec& spec) {
  if ((spec.norm() == v1::NORM_UNSPECIFIED || spec.norm() == v1::NORM_NONE) && !spec.bias())
    return absl::OkStatus();
  return absl::FailedPreconditionError("--data real needs a head without norm and bias");
}

absl::StatusOr<HiddenRows> MakeRealRows(const data::RealRows& rows, v1::DType dtype) {
  TensorData hidden{formats::DType::kFloat32, {rows.rows(), rows.hidden_size()}, {}};
  hidden.bytes.resize(static_cast<size_t>(rows.rows() * rows.hidden_size()) * sizeof(float));
  auto* const values = reinterpret_cast<float*>(hidden.bytes.data());
  std::vector<int32_t> targets(static_cast<size_t>(rows.rows()));
  data::InParallel(0, rows.rows(), [&](int64_t begin, int64_t end) {
    data::FillHidden(rows, begin, end, values + begin * rows.hidden_size(), targets.data() + begin);
  });
  absl::StatusOr<std::vector<uint8_t>> converted = ConvertTo(dtype, hidden);
  if (!converted.ok()) return converted.status();
  return HiddenRows{static_cast<uint64_t>(rows.rows()), static_cast<uint64_t>(rows.hidden_size()), dtype,
                    *std::move(converted), std::move(targets)};
}

absl::Status WriteRealWeight(const data::RealRows& rows, const std::string& head, client::Client& client) {
  std::vector<float> block;
  for (int64_t begin = 0; begin < rows.vocab_size(); begin += kClassesAtOnce) {
    const int64_t end = std::min(begin + kClassesAtOnce, rows.vocab_size());
    block.resize(static_cast<size_t>((end - begin) * rows.hidden_size()));
    data::InParallel(begin, end, [&](int64_t from, int64_t to) {
      data::FillWeight(rows, from, to, block.data() + (from - begin) * rows.hidden_size());
    });
    v1::OpenTensor open;
    open.set_head(head);
    open.set_param(v1::PARAM_WEIGHT);
    open.mutable_rows()->set_begin(static_cast<uint64_t>(begin));
    open.mutable_rows()->set_end(static_cast<uint64_t>(end));
    const auto* const bytes = reinterpret_cast<const char*>(block.data());
    const auto written = client.WriteTensor(open, absl::MakeSpan(bytes, block.size() * sizeof(float)));
    if (!written.ok()) return written.status();
  }
  return absl::OkStatus();
}

}  // namespace lossd::cli
