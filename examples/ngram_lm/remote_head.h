// SPDX-License-Identifier: Apache-2.0
// Stage two of the demo: a head that lives in a lossd server, which the trainer sees as a LossHead.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_REMOTE_HEAD_H_
#define LOSSD_EXAMPLES_NGRAM_LM_REMOTE_HEAD_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "examples/ngram_lm/loss_head.h"

namespace lossd::ngram_lm {

// Not thread-safe. Tickets must not outlive the head.
class RemoteHead : public LossHead {
 public:
  struct Options {
    std::string target = "127.0.0.1:7070";  // the server
    std::string name = "demo";
    int64_t hidden_size = 0;  // D
    int64_t vocab_size = 0;   // V
    uint64_t seed = 0;        // of the head's initial weights
    double weight_decay = 0.01;
  };

  // Connects and creates the head, with a bias, Adam state and random weights. ALREADY_EXISTS if the server
  // has a head of that name.
  static absl::StatusOr<std::unique_ptr<RemoteHead>> Create(const Options& options);
  // Connects and has the server load one of its checkpoints into the head, which need not be there.
  static absl::StatusOr<std::unique_ptr<RemoteHead>> Restore(const Options& options,
                                                             const std::string& checkpoint);

  // Has the server save the head; the checkpoint's name.
  absl::StatusOr<std::string> Save();
  // Goes back to a checkpoint, also on a server that was started again. Waits up to `patience` for that.
  absl::Status GoBack(const std::string& checkpoint, absl::Duration patience);

  uint64_t step() const override { return step_; }
  Ticket Start(const LossRequest& request) override;
  absl::Status ApplyStep(int64_t microbatches, double learning_rate) override;

  // Deletes the head from the server.
  absl::Status Delete();

  const lossd::v1::HeadDescription& description() const { return description_; }

 private:
  RemoteHead(const Options& options, std::unique_ptr<client::Client> client,
             lossd::v1::HeadDescription description);

  static absl::StatusOr<std::unique_ptr<client::Client>> Connect(const Options& options);
  absl::Status Load(const std::string& checkpoint);

  const Options options_;
  const std::unique_ptr<client::Client> client_;
  lossd::v1::HeadDescription description_;
  uint64_t step_;
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_REMOTE_HEAD_H_
