// SPDX-License-Identifier: Apache-2.0
// What a manifest says beside the head's config and its tensors: counters, the last step, who trained. Parts
// of manifest.cc. Stateless and thread-safe.
//
// Decode functions throw Json::exception for a missing key or a value of another type, and return false for a
// value out of range.
#ifndef LOSSD_SERVER_HEAD_MANIFEST_RECORDS_H_
#define LOSSD_SERVER_HEAD_MANIFEST_RECORDS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/head/manifest.h"

namespace lossd::head {

using Json = nlohmann::ordered_json;

inline constexpr size_t kMostShown = 40;  // characters of a value in an error message
inline constexpr absl::Time kLatestSave = absl::FromUnixSeconds(253'402'300'799);  // the end of the year 9999

std::string EncodeIncarnation(uint64_t incarnation);

// Steps, updates, save_number, and the counts of the last step, which it makes if there is one. DATA_LOSS
// that names the field and its value if one is not a whole number from 0 to kMostCounted.
absl::Status DecodeCounts(const Json& json, Manifest* manifest);

Json EncodeLastStep(const std::optional<AppliedStep>& step);
// After DecodeCounts.
bool DecodeLastStep(const Json& json, std::optional<AppliedStep>* step);

Json EncodeHistory(const CheckpointSubject& subject);
// Manifests of older servers have none.
bool DecodeHistory(const Json& json, CheckpointSubject* subject);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_MANIFEST_RECORDS_H_
