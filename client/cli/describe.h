// SPDX-License-Identifier: Apache-2.0
// The protocol's messages for people and for scripts. JSON keys are stable: they may be added to, not
// changed. Incarnations are strings of sixteen hexadecimal digits; other 64-bit numbers are JSON numbers.
//
// Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_DESCRIBE_H_
#define LOSSD_CLIENT_CLI_DESCRIBE_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/types/span.h"
#include "client/cli/style.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/server.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::cli {

uint64_t TotalBytes(const v1::MemoryUsage& memory);

nlohmann::ordered_json ToJson(const v1::MemoryUsage& memory);
nlohmann::ordered_json ToJson(const v1::HeadState& state);
nlohmann::ordered_json ToJson(const v1::HeadDescription& head);
nlohmann::ordered_json ToJson(const v1::ServerDescription& server);

// "512 x 50,257 + bias, rmsnorm"
std::string Shape(const v1::HeadSpec& spec);

std::string HeadsTable(absl::Span<const v1::HeadDescription> heads, const Style& style = {});
std::string HeadText(const v1::HeadDescription& head, const Style& style = {});
// What each device has of a head whose classes are divided, and does; empty for other heads.
std::string DevicesTable(const v1::HeadDescription& head, const Style& style = {});
std::string ServerText(const v1::ServerDescription& server, const std::string& address,
                       const Style& style = {});

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_DESCRIBE_H_
