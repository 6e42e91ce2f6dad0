// SPDX-License-Identifier: Apache-2.0
// The JSON that lossctl reads and prints, whose objects keep the order of their members. A source that uses
// more than the name includes <nlohmann/json.hpp>. It is shorter than 60 lines because all views include it.
#ifndef LOSSD_CLIENT_CLI_JSON_H_
#define LOSSD_CLIENT_CLI_JSON_H_

#include <nlohmann/json_fwd.hpp>

namespace lossd::cli {

using Json = nlohmann::ordered_json;

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_JSON_H_
