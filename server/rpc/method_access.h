// SPDX-License-Identifier: Apache-2.0
// The table from method to role: what a caller has to be to call each method of lossd.v1. A method that is
// not in the table is refused to every client; method_access_test walks over the protocol's services.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_RPC_METHOD_ACCESS_H_
#define LOSSD_SERVER_RPC_METHOD_ACCESS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/access/role.h"

namespace lossd::rpc {

struct MethodAccess {
  absl::string_view service;  // "lossd.v1.HeadService"
  absl::string_view method;   // "CreateHead"; no two services have a method of one name
  access::Role role = access::Role::kAdmin;
  bool audited = true;  // each call of it is an audit line
};

absl::Span<const MethodAccess> MethodAccessTable();

// The line of a method; null if there is none.
const MethodAccess* FindMethodAccess(absl::string_view method);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_METHOD_ACCESS_H_
