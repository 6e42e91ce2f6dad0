// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/peer.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace lossd::rpc {

std::string PeerOf(absl::string_view uri, uint64_t connection) {
  if (absl::StartsWith(uri, "inproc")) return "";
  if (absl::StartsWith(uri, "unix:")) return absl::StrCat("unix#", absl::Hex(connection));
  const bool is_ipv4 = absl::ConsumePrefix(&uri, "ipv4:");
  const bool is_ipv6 = !is_ipv4 && absl::ConsumePrefix(&uri, "ipv6:");
  if (!is_ipv4 && !is_ipv6) return std::string(uri);
  const std::string text = absl::StrReplaceAll(uri, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
  const bool loopback = is_ipv4 ? absl::StartsWith(text, "127.")
                                : absl::StartsWith(text, "[::1]") || absl::StartsWith(text, "[::ffff:127.");
  if (loopback) return text;
  return text.substr(0, text.rfind(':'));
}

}  // namespace lossd::rpc
