// SPDX-License-Identifier: Apache-2.0
// What the ranks send each other as types of the kernels and of checkpoints, and back.
//
// All functions are stateless and thread-safe. Both ends are of one version and one host order, and admitted;
// what a message must not say is refused where it would be out of the range of an enumeration or an array.
#ifndef LOSSD_SERVER_RANKS_MESSAGES_H_
#define LOSSD_SERVER_RANKS_MESSAGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/head/manifest.h"

namespace lossd::ranks {

v1::Status ToProto(const absl::Status& status);
absl::Status FromProto(const v1::Status& status);

v1::HeadConfig ToProto(const kernels::HeadConfig& config);
absl::StatusOr<kernels::HeadConfig> FromProto(const v1::HeadConfig& config);

v1::Step ToProto(const kernels::OptimizerOptions& options, int64_t update);
absl::StatusOr<kernels::OptimizerOptions> FromProto(const v1::Step& step);

v1::LossOptions ToProto(const kernels::LossOptions& options);
absl::StatusOr<kernels::LossOptions> FromProto(const v1::LossOptions& options);

v1::Memory ToProto(const kernels::MemoryStats& stats);
kernels::MemoryStats FromProto(const v1::Memory& memory);

v1::BackendInfo ToProto(const kernels::BackendInfo& info, int max_chunks_in_flight);
absl::StatusOr<kernels::BackendInfo> FromProto(const v1::BackendInfo& info);

v1::TensorAccess ToProto(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype);
absl::StatusOr<kernels::TensorId> TensorOf(const v1::TensorAccess& access);
absl::StatusOr<kernels::DType> DTypeOf(uint32_t value);

void SetBytes(const kernels::MemoryBytes& bytes, google::protobuf::RepeatedField<int64_t>* out);
kernels::MemoryBytes BytesOf(const google::protobuf::RepeatedField<int64_t>& values);

void SetChoices(const std::vector<kernels::Choice>& choices,
                google::protobuf::RepeatedPtrField<v1::Choice>* out);
std::vector<kernels::Choice> ChoicesOf(const google::protobuf::RepeatedPtrField<v1::Choice>& choices);

v1::SliceSums ToProto(const kernels::SliceSums& sums);
kernels::SliceSums FromProto(const v1::SliceSums& sums);

// What the writer of a file knows of it: its size and tensors. The leader knows its name and classes.
v1::FileLine ToProto(const head::ManifestShard& shard);
head::ManifestShard FromProto(const v1::FileLine& line);

absl::StatusOr<kernels::Gradients> GradientsOf(uint32_t value);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_MESSAGES_H_
