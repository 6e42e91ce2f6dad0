// SPDX-License-Identifier: Apache-2.0
// The fake server with the faults of a script, and a log of what reached it: one "repeats" case of golden/
// (golden/README.md says how a case is written).
//
// Thread-safe. Its incarnations are 1, 2, ...; its head "head" has D = 8, V = 10. Calls come one after the
// other, each over one stream.
#ifndef LOSSD_TESTS_CLIENT_SCRIPTED_SERVER_H_
#define LOSSD_TESTS_CLIENT_SCRIPTED_SERVER_H_

#include <cstddef>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tests/client/fake_server.h"

namespace lossd::fake {

class ScriptedServer {
 public:
  // `script`: the case's members "limits", "faults" and, if it has it, "versions". Throws
  // nlohmann::json::exception, or std::invalid_argument naming what it does not know.
  explicit ScriptedServer(const nlohmann::json& script);

  std::string target() const { return server_->target(); }
  nlohmann::json Log() const;

 private:
  Fault OnRequest(const v1::ComputeLossRequest& request);
  void OnAccepted(v1::MicrobatchAccepted* accepted);
  Fault OnDescribe();
  Fault OnAdd(const v1::OpenGradient& open);
  Fault OnRead(uint64_t slice);
  Fault OnApply(const v1::ApplyStepRequest& request);

  const nlohmann::json faults_;
  mutable absl::Mutex mu_;
  nlohmann::json log_ ABSL_GUARDED_BY(mu_) = nlohmann::json::array();
  size_t streams_ ABSL_GUARDED_BY(mu_) = 0;     // opened
  size_t slices_ ABSL_GUARDED_BY(mu_) = 0;      // of the last stream
  size_t open_entry_ ABSL_GUARDED_BY(mu_) = 0;  // the last stream's, in log_
  size_t describes_ ABSL_GUARDED_BY(mu_) = 0;
  size_t contributions_ ABSL_GUARDED_BY(mu_) = 0;
  size_t reads_ ABSL_GUARDED_BY(mu_) = 0;
  size_t steps_ ABSL_GUARDED_BY(mu_) = 0;
  std::unique_ptr<FakeServer> server_;  // last: it goes before what its calls use
};

// The number of a status code, from its name in capitals. Throws std::invalid_argument for other names.
int StatusCodeNamed(const std::string& name);

}  // namespace lossd::fake

#endif  // LOSSD_TESTS_CLIENT_SCRIPTED_SERVER_H_
