// SPDX-License-Identifier: Apache-2.0
// Reads, writes and adds to a head's tensors in slices, between the wire and the caller's memory.
//
// Functions block, and try once; they are thread-safe.
#ifndef LOSSD_CLIENT_CPP_TENSOR_TRANSFER_H_
#define LOSSD_CLIENT_CPP_TENSOR_TRANSFER_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/core.h"

namespace lossd::client::internal {

// The shape of a parameter of a head. INVALID_ARGUMENT if the value is no parameter.
absl::StatusOr<TensorShape> ParamShape(const v1::HeadSpec& spec, v1::Param param);

// INTERNAL if the tensor has not `tensor_rows` rows, if that is known.
absl::StatusOr<TensorShape> ReadTensor(const Core& core, const v1::ReadTensorRequest& request,
                                       absl::Span<char> out, absl::Time deadline,
                                       std::optional<uint64_t> tensor_rows = std::nullopt);

// `shape` is the whole tensor's.
absl::StatusOr<v1::WriteTensorResponse> WriteTensor(const Core& core, const v1::OpenTensor& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline);

// The same for a gradient.
absl::StatusOr<v1::AddGradientResponse> AddGradient(const Core& core, const v1::OpenGradient& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_TENSOR_TRANSFER_H_
