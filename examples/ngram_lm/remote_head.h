// SPDX-License-Identifier: Apache-2.0
// A head that lives in a lossd server.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_REMOTE_HEAD_H_
#define LOSSD_EXAMPLES_NGRAM_LM_REMOTE_HEAD_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"

namespace lossd::ngram_lm {

// N rows. The memory is the caller's and must stay until the ticket has been called or destroyed.
struct LossRequest {
  uint64_t step = 0;                  // of the head
  uint64_t microbatch = 0;            // within the step
  absl::Span<const float> hidden;     // [N, D]
  absl::Span<const int32_t> targets;  // [N]
  // What the summed loss is divided by before gradients are taken.
  double normalizer = 1;
  // [N, D]: where dL/dx goes; the head's own gradient is accumulated as well. Empty: loss only.
  absl::Span<float> grad_hidden;
  // Empty, or [N]: the most likely class of each row.
  absl::Span<int32_t> argmax;
};

struct LossSums {
  double loss = 0;  // nats, summed over rows, before the normalizer
  int64_t rows = 0;
  int64_t correct = 0;  // rows whose most likely class is the target
};

class LossHead {
 public:
  // Called once: blocks until the request is done. Destroying it uncalled cancels the request.
  using Ticket = absl::AnyInvocable<absl::StatusOr<LossSums>()>;

  virtual ~LossHead() = default;

  // The head's open step, which training requests name.
  virtual uint64_t step() const = 0;
  // Starts a request. Several may be under way.
  virtual Ticket Start(const LossRequest& request) = 0;
  // Updates the head from microbatches 0 .. microbatches - 1 of the open step and opens the next one.
  virtual absl::Status ApplyStep(int64_t microbatches, double learning_rate) = 0;
};

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
