// SPDX-License-Identifier: Apache-2.0
// ScriptedServer: a FakeServer that makes the errors that a script lists, and logs what it receives. A script
// is one "repeats" case of golden/ (golden/README.md describes its form).
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
  size_t streams_ ABSL_GUARDED_BY(mu_) = 0;     // streams that were opened
  size_t slices_ ABSL_GUARDED_BY(mu_) = 0;      // slices of the last stream
  size_t open_entry_ ABSL_GUARDED_BY(mu_) = 0;  // the index in log_ of the last stream's entry
  size_t describes_ ABSL_GUARDED_BY(mu_) = 0;
  size_t contributions_ ABSL_GUARDED_BY(mu_) = 0;
  size_t reads_ ABSL_GUARDED_BY(mu_) = 0;
  size_t steps_ ABSL_GUARDED_BY(mu_) = 0;
  // The last member, because its calls use the others and it must be destroyed first.
  std::unique_ptr<FakeServer> server_;
};

// The number of a status code whose name is given in capitals. Throws std::invalid_argument for other names.
int StatusCodeNamed(const std::string& name);

}  // namespace lossd::fake

#endif  // LOSSD_TESTS_CLIENT_SCRIPTED_SERVER_H_
