// SPDX-License-Identifier: Apache-2.0
// ngram_lm_demo: trains a small neural n-gram language model (model.h) whose classifier is a head on a lossd
// server. Exit status: 0 if the model learned; 1 if the held-out loss is not below the unigram entropy by
// --margin; 2 if the demo could not run.
#include <cblas.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "examples/ngram_lm/model.h"
#include "examples/ngram_lm/trainer.h"
#include "kernels/clocks/clock.h"

ABSL_FLAG(std::string, server, "127.0.0.1:7070", "lossd to train with, host:port");
ABSL_FLAG(std::string, head, "demo", "name of the head to create there");
ABSL_FLAG(bool, keep_head, false, "leave the head on the server at the end");
ABSL_FLAG(std::string, text, "/usr/share/perl/*/pod/*.pod",
          "files to learn, a pattern; default: the manual pages of Perl (package perl-doc)");
ABSL_FLAG(int32_t, vocab, 8192, "classes: words of the text at most");
ABSL_FLAG(int64_t, context, 8, "words the model looks back");
ABSL_FLAG(int64_t, embedding, 64, "size of a word's embedding");
ABSL_FLAG(int64_t, hidden, 256, "size of the hidden layer");
ABSL_FLAG(int64_t, hidden_state, 128, "size of the hidden state sent to the head");
ABSL_FLAG(int64_t, microbatches, 4, "microbatches a step");
ABSL_FLAG(int64_t, microbatch_rows, 256, "words a microbatch");
ABSL_FLAG(absl::Duration, time, absl::Seconds(90), "how long to train");
ABSL_FLAG(int64_t, steps, 0, "train this many steps instead");
ABSL_FLAG(
    std::string, state_file, "",
    "file with the trainer's state: written on the way, with a checkpoint of the head; if it is there at "
    "the start, training goes on from it. Needs --steps");
ABSL_FLAG(int64_t, save_every, 50, "steps from one state to the next");
ABSL_FLAG(std::string, loss_log, "", "file to append each step's number and loss to");
ABSL_FLAG(double, margin, 0.5, "nats below the unigram entropy the held-out loss must end");

namespace lossd::ngram_lm {
namespace {

absl::Status CheckFlags() {
  for (const auto* flag : {&FLAGS_context, &FLAGS_embedding, &FLAGS_hidden, &FLAGS_hidden_state,
                           &FLAGS_microbatches, &FLAGS_microbatch_rows, &FLAGS_save_every}) {
    if (absl::GetFlag(*flag) < 1)
      return absl::InvalidArgumentError("--context, --embedding, sizes and counts are at least 1");
  }
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  if (steps < 0 || absl::GetFlag(FLAGS_time) <= absl::ZeroDuration())
    return absl::InvalidArgumentError("--steps or --time: there is nothing to train");
  if (steps == 0 && !absl::GetFlag(FLAGS_state_file).empty())
    return absl::InvalidArgumentError("--state_file: needs --steps");
  return absl::OkStatus();
}

TrainerOptions OptionsFromFlags(const Text& text) {
  TrainerOptions options;
  options.server = absl::GetFlag(FLAGS_server);
  options.head = absl::GetFlag(FLAGS_head);
  options.state_file = absl::GetFlag(FLAGS_state_file);
  options.shape.tokens = text.vocab_size;
  options.shape.context = absl::GetFlag(FLAGS_context);
  options.shape.embedding = absl::GetFlag(FLAGS_embedding);
  options.shape.hidden = absl::GetFlag(FLAGS_hidden);
  options.shape.output = absl::GetFlag(FLAGS_hidden_state);
  options.microbatches = absl::GetFlag(FLAGS_microbatches);
  options.microbatch_rows = absl::GetFlag(FLAGS_microbatch_rows);
  return options;
}

// A whole training: runs steps until --time or --steps is over, and evaluates held-out text now and then.
// With a state file it saves both stages on the way, and returns to the last save if the server is lost.
class Training {
 public:
  explicit Training(Trainer* trainer) : trainer_(trainer), start_(clocks::SteadyNow()) {}
  ~Training() {
    if (loss_log_ != nullptr) std::fclose(loss_log_);
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  absl::Status Run() {
    if (const std::string path = absl::GetFlag(FLAGS_loss_log); !path.empty()) {
      loss_log_ = std::fopen(path.c_str(), "a");
      if (loss_log_ == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("--loss_log: ", path));
    }
    while (Done() < 1) {
      absl::Status status = Step();
      if (status.ok()) continue;
      if (absl::GetFlag(FLAGS_state_file).empty() || !ServerWasLost(status)) return status;
      absl::PrintF("lost the server after step %d: %s\n", trainer_->steps(), status.ToString());
      if (absl::Status back = trainer_->GoBack(); !back.ok()) return back;
      absl::PrintF("the server is back; both go on from step %d\n", trainer_->steps());
    }
    const double seconds = absl::ToDoubleSeconds(clocks::SteadyNow() - start_);
    absl::PrintF("\ntrained %d steps, %d tokens in %.0f s: %.0f tokens/s\n", trainer_->steps(), tokens_,
                 seconds, static_cast<double>(tokens_) / seconds);
    return absl::OkStatus();
  }

 private:
  // The fraction of the training that is over, in [0, 1].
  double Done() const {
    const int64_t steps = absl::GetFlag(FLAGS_steps);
    if (steps > 0) return static_cast<double>(trainer_->steps()) / static_cast<double>(steps);
    return std::min(1.0, absl::FDivDuration(clocks::SteadyNow() - start_, absl::GetFlag(FLAGS_time)));
  }

  absl::Status Step() {
    constexpr int kEvaluations = 8;
    constexpr int64_t kEvaluationRows = 8192;
    const double done = Done();
    if (done >= next_evaluation_) {
      const absl::StatusOr<double> held_out = trainer_->Evaluate(kEvaluationRows);
      if (!held_out.ok()) return held_out.status();
      absl::PrintF("step %5d   held-out loss %.3f   perplexity %.1f\n", trainer_->steps(), *held_out,
                   std::exp(*held_out));
      std::fflush(stdout);
      next_evaluation_ = done + 1.0 / kEvaluations;
    }
    const absl::StatusOr<double> loss = trainer_->Step(RateMultiplier(done));
    if (!loss.ok()) return loss.status();
    tokens_ += trainer_->tokens_per_step();
    if (loss_log_ != nullptr) {
      absl::FPrintF(loss_log_, "%d %.17g\n", trainer_->steps(), *loss);
      std::fflush(loss_log_);
    }
    const int64_t steps = trainer_->steps();
    const bool save = steps % absl::GetFlag(FLAGS_save_every) == 0 || steps == absl::GetFlag(FLAGS_steps);
    return save && !absl::GetFlag(FLAGS_state_file).empty() ? trainer_->Save() : absl::OkStatus();
  }

  Trainer* const trainer_;
  const absl::Time start_;
  FILE* loss_log_ = nullptr;
  double next_evaluation_ = 0;
  int64_t tokens_ = 0;  // the tokens that this process has trained on
};

bool PrintVerdict(double unigram, double held_out) {
  absl::PrintF("held-out text          loss (nats/token)   perplexity\n");
  absl::PrintF("  unigram frequencies  %17.3f   %10.1f\n", unigram, std::exp(unigram));
  absl::PrintF("  this model           %17.3f   %10.1f\n", held_out, std::exp(held_out));
  const double margin = absl::GetFlag(FLAGS_margin);
  const bool learned = held_out < unigram - margin;  // false if held_out is NaN
  absl::PrintF("%s: %.3f nats below the unigram entropy, %.2f wanted\n", learned ? "learned" : "NOT LEARNED",
               unigram - held_out, margin);
  return learned;
}

absl::StatusOr<bool> Run() {
  if (absl::Status flags = CheckFlags(); !flags.ok()) return flags;
  const absl::StatusOr<Text> text = LoadText(absl::GetFlag(FLAGS_text), absl::GetFlag(FLAGS_vocab));
  if (!text.ok()) return text.status();
  absl::PrintF("text: %d tokens to train on, %d held out; %d classes\n", text->train.size(),
               text->held_out.size(), text->vocab_size);
  const TrainerOptions options = OptionsFromFlags(*text);
  if (static_cast<int64_t>(text->held_out.size()) <= options.shape.context)
    return absl::InvalidArgumentError("--text: too short for --context");
  const absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Open(options, &*text);
  if (!trainer.ok()) return trainer.status();
  absl::PrintF("model: %d parameters here, %d on the server (head %s, [%d, %d])\n",
               (*trainer)->stage_one().parameters().size(), (options.shape.output + 1) * text->vocab_size,
               options.head, text->vocab_size, options.shape.output);
  if ((*trainer)->steps() > 0) absl::PrintF("going on from step %d\n", (*trainer)->steps());
  if (absl::Status trained = Training(trainer->get()).Run(); !trained.ok()) return trained;
  constexpr int64_t kLastEvaluationRows = 65'536;
  const absl::StatusOr<double> held_out = (*trainer)->Evaluate(kLastEvaluationRows);
  if (!held_out.ok()) return held_out.status();
  const bool learned = PrintVerdict(UnigramEntropy(*text), *held_out);
  if (!absl::GetFlag(FLAGS_keep_head)) {
    if (absl::Status deleted = (*trainer)->DeleteHead(); !deleted.ok()) return deleted;
  }
  return learned;
}

}  // namespace
}  // namespace lossd::ngram_lm

int main(int argc, char** argv) {
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [](absl::string_view file) {
    return absl::StrContains(file, "examples/ngram_lm/");
  };
  config.contains_helpshort_flags = config.contains_help_flags;
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage("Trains a small language model whose classifier lives in a lossd server.");
  absl::ParseCommandLine(argc, argv);
  openblas_set_num_threads(1);
  const absl::StatusOr<bool> learned = lossd::ngram_lm::Run();
  if (!learned.ok()) {
    absl::FPrintF(stderr, "ngram_lm_demo: %s\n", learned.status().ToString());
    return 2;
  }
  return *learned ? 0 : 1;
}
