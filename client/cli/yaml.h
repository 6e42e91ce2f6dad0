// SPDX-License-Identifier: Apache-2.0
// JSON documents as YAML, for people who read them.
//
// A JSON text is YAML already; this only lays objects and lists out by indentation, and leaves the quotes
// away where no YAML parser can take the text for anything else: neither one of YAML 1.1, where `no` is false
// and `1e-05` a string, nor one of 1.2. (yaml-cpp's emitter leaves them away around "123" and "1e3".)
//
// Pure, thread-safe.
#ifndef LOSSD_CLIENT_CLI_YAML_H_
#define LOSSD_CLIENT_CLI_YAML_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lossd::cli {

// Ends in a newline.
std::string ToYaml(const nlohmann::ordered_json& document);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_YAML_H_
