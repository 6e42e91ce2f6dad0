// SPDX-License-Identifier: Apache-2.0
// ngram_lm_demo: trains a small neural n-gram language model whose classifier lives in a lossd server.
// Exit status: 0 learned, 1 held-out loss not below the unigram entropy by --margin, 2 could not run.
#include <cblas.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "examples/ngram_lm/corpus.h"
#include "examples/ngram_lm/persistence.h"
#include "examples/ngram_lm/remote_head.h"
#include "examples/ngram_lm/trainer.h"
#include "examples/ngram_lm/training_run.h"
#include "kernels/clocks/clock.h"

ABSL_FLAG(std::string, server, "127.0.0.1:7070", "lossd to train with, host:port");
ABSL_FLAG(std::string, head, "demo", "name of the head to create there");
ABSL_FLAG(bool, keep_head, false, "leave the head on the server at the end");
ABSL_FLAG(std::string, text, "", "file to learn; default: the manual pages of Perl (package perl-doc)");
ABSL_FLAG(int32_t, vocab, 8192, "classes: tokens of the byte-pair encoding at most");
ABSL_FLAG(int64_t, context, 8, "tokens the model looks back");
ABSL_FLAG(int64_t, embedding, 64, "size of a token's embedding");
ABSL_FLAG(int64_t, hidden, 256, "size of the hidden layer");
ABSL_FLAG(int64_t, hidden_state, 128, "size of the hidden state sent to the head");
ABSL_FLAG(int64_t, microbatches, 4, "microbatches a step");
ABSL_FLAG(int64_t, microbatch_rows, 256, "tokens a microbatch");
ABSL_FLAG(absl::Duration, time, absl::Seconds(90), "how long to train");
ABSL_FLAG(int64_t, steps, 0, "train this many steps instead");
ABSL_FLAG(float, learning_rate, 4e-3f, "peak learning rate of stage one (Adam)");
ABSL_FLAG(double, head_learning_rate, 8e-3, "peak learning rate of the head (AdamW, on the server)");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights and the order of the text");
ABSL_FLAG(int32_t, threads, 1, "threads of stage one's matrix products");
ABSL_FLAG(
    std::string, state_file, "",
    "file with the trainer's state: written on the way, with a checkpoint of the head; if it is there at the "
    "start, training goes on from it. Needs --steps");
ABSL_FLAG(int64_t, save_every, 50, "steps from one state to the next");
ABSL_FLAG(absl::Duration, server_patience, absl::Minutes(1),
          "with --state_file: how long to wait for a server that is gone");
ABSL_FLAG(std::string, loss_log, "", "file to append each step's number and loss to");
ABSL_FLAG(double, margin, 0.5, "nats below the unigram entropy the held-out loss must end");

namespace lossd::ngram_lm {
namespace {

// The text as tokens.
struct Data {
  Tokenizer tokenizer;
  std::vector<int32_t> train;
  std::vector<int32_t> held_out;
};

absl::Status CheckFlags() {
  const std::pair<const char*, int64_t> counts[] = {{"context", absl::GetFlag(FLAGS_context)},
                                                    {"embedding", absl::GetFlag(FLAGS_embedding)},
                                                    {"hidden", absl::GetFlag(FLAGS_hidden)},
                                                    {"hidden_state", absl::GetFlag(FLAGS_hidden_state)},
                                                    {"microbatches", absl::GetFlag(FLAGS_microbatches)},
                                                    {"microbatch_rows", absl::GetFlag(FLAGS_microbatch_rows)},
                                                    {"save_every", absl::GetFlag(FLAGS_save_every)},
                                                    {"threads", absl::GetFlag(FLAGS_threads)}};
  for (const auto& [name, value] : counts) {
    if (value < 1) return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", value, " is below 1"));
  }
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  if (steps < 0) return absl::InvalidArgumentError(absl::StrCat("--steps: ", steps, " is below 0"));
  if (steps == 0 && !absl::GetFlag(FLAGS_state_file).empty())
    return absl::InvalidArgumentError("--state_file: needs --steps");
  const absl::Duration time = absl::GetFlag(FLAGS_time);
  if (time <= absl::ZeroDuration() || time > absl::Hours(1000)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--time: ", absl::FormatDuration(time), " is not in (0, 1000h]"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> LoadDocuments() {
  const std::string path = absl::GetFlag(FLAGS_text);
  if (path.empty()) return LoadPerlManual();
  absl::StatusOr<std::string> text = LoadFile(path);
  if (!text.ok()) return text.status();
  return std::vector<std::string>{*std::move(text)};
}

absl::StatusOr<Data> PrepareData() {
  const absl::StatusOr<std::vector<std::string>> documents = LoadDocuments();
  if (!documents.ok()) return documents.status();
  const TextSplit split = SplitBlocks(*documents);
  if (split.held_out.empty()) {
    return absl::InvalidArgumentError(
        "--text: too short to hold out a part of it; it needs 20 lines and better a megabyte");
  }
  const absl::Time start = clocks::SteadyNow();
  absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Train(split.train, absl::GetFlag(FLAGS_vocab));
  if (!tokenizer.ok()) return tokenizer.status();
  Data data{*std::move(tokenizer), {}, {}};
  data.train = data.tokenizer.Encode(split.train);
  data.held_out = data.tokenizer.Encode(split.held_out);
  absl::PrintF("text: %.2f MB in %d documents; %d tokens to train on, %d held out; %d classes (%.1f s)\n",
               static_cast<double>(split.train.size() + split.held_out.size()) / 1e6, documents->size(),
               data.train.size(), data.held_out.size(), data.tokenizer.vocab_size(),
               absl::ToDoubleSeconds(clocks::SteadyNow() - start));
  return data;
}

StageOneShape ShapeFromFlags(const Data& data) {
  StageOneShape shape;
  shape.tokens = data.tokenizer.vocab_size() + 1;  // and the padding before the text
  shape.context = absl::GetFlag(FLAGS_context);
  shape.embedding = absl::GetFlag(FLAGS_embedding);
  shape.hidden = absl::GetFlag(FLAGS_hidden);
  shape.output = absl::GetFlag(FLAGS_hidden_state);
  return shape;
}

// Restored from the state's checkpoint, or a new one.
absl::StatusOr<std::unique_ptr<RemoteHead>> OpenHead(const Data& data,
                                                     const std::optional<TrainerState>& state) {
  RemoteHead::Options options;
  options.target = absl::GetFlag(FLAGS_server);
  options.name = absl::GetFlag(FLAGS_head);
  options.hidden_size = absl::GetFlag(FLAGS_hidden_state);
  options.vocab_size = data.tokenizer.vocab_size();
  options.seed = absl::GetFlag(FLAGS_seed);
  return state.has_value() ? RemoteHead::Restore(options, state->checkpoint) : RemoteHead::Create(options);
}

// What an earlier run of this training left, if there was one.
absl::StatusOr<std::optional<TrainerState>> EarlierState() {
  const std::string path = absl::GetFlag(FLAGS_state_file);
  if (path.empty()) return std::nullopt;
  absl::StatusOr<TrainerState> state = LoadState(path);
  if (absl::IsNotFound(state.status())) return std::nullopt;
  if (!state.ok()) return state.status();
  return *std::move(state);
}

// Appends a line for each step to --loss_log.
absl::StatusOr<StepObserver> LossLog() {
  const std::string path = absl::GetFlag(FLAGS_loss_log);
  if (path.empty()) return StepObserver();
  std::shared_ptr<FILE> file(std::fopen(path.c_str(), "a"), [](FILE* f) {
    if (f != nullptr) std::fclose(f);
  });
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("--loss_log: cannot open ", path));
  return [file](int64_t step, double loss) {
    absl::FPrintF(file.get(), "%d %.17g\n", step, loss);
    std::fflush(file.get());
    return absl::OkStatus();
  };
}

TrainerOptions TrainerOptionsFromFlags() {
  TrainerOptions options;
  options.microbatches = absl::GetFlag(FLAGS_microbatches);
  options.microbatch_rows = absl::GetFlag(FLAGS_microbatch_rows);
  options.seed = absl::GetFlag(FLAGS_seed);
  return options;
}

RunOptions RunOptionsFromFlags() {
  RunOptions options;
  options.steps = absl::GetFlag(FLAGS_steps);
  options.time = absl::GetFlag(FLAGS_time);
  options.learning_rate = absl::GetFlag(FLAGS_learning_rate);
  options.head_learning_rate = absl::GetFlag(FLAGS_head_learning_rate);
  return options;
}

absl::StatusOr<RunResult> Train(const Data& data, Trainer* trainer, RemoteHead* head) {
  const absl::StatusOr<StepObserver> loss_log = LossLog();
  if (!loss_log.ok()) return loss_log.status();
  const RunOptions options = RunOptionsFromFlags();
  PersistenceOptions persistence;
  persistence.state_file = absl::GetFlag(FLAGS_state_file);
  persistence.save_every = absl::GetFlag(FLAGS_save_every);
  persistence.server_patience = absl::GetFlag(FLAGS_server_patience);
  if (persistence.state_file.empty()) return RunTraining(options, data.held_out, trainer, stdout, *loss_log);
  return RunPersistently(persistence, options, data.held_out, trainer, head, stdout, *loss_log);
}

// What the model says after a few words of held-out text.
absl::Status PrintContinuations(const Data& data, Trainer* trainer) {
  constexpr size_t kPrompts = 3, kPromptTokens = 10, kNewTokens = 20;
  std::vector<std::vector<int32_t>> sequences;
  for (size_t i = 0; i < kPrompts; ++i) {
    const auto begin =
        data.held_out.begin() + static_cast<int64_t>(data.held_out.size() * (i + 1) / (kPrompts + 2));
    sequences.emplace_back(begin, begin + std::min<int64_t>(kPromptTokens, data.held_out.end() - begin));
  }
  const std::vector<std::vector<int32_t>> prompts = sequences;
  const absl::Status status = trainer->Continue(kNewTokens, &sequences);
  if (!status.ok()) return status;
  std::puts("\nmost likely continuations of held-out words:");
  for (size_t i = 0; i < kPrompts; ++i) {
    const std::string prompt = data.tokenizer.Decode(prompts[i]);
    const std::string all = data.tokenizer.Decode(sequences[i]);
    const std::string text = absl::StrCat("  ", prompt, " [", all.substr(prompt.size()), " ]");
    std::puts(absl::StrReplaceAll(text, {{"\n", " "}}).c_str());
  }
  return absl::OkStatus();
}

void PrintCurve(const RunResult& run, double unigram) {
  PlotData plot;
  plot.curve = run.train;
  plot.marks = run.held_out;
  plot.reference = unigram;
  plot.reference_label = "unigram";
  PlotOptions options;
  options.title = "loss, nats a token (line: training, o: held out)";
  options.x_label = "step";
  absl::PrintF("\n%s", RenderPlot(plot, options));
}

bool PrintVerdict(const RunResult& run, double unigram, double held_out) {
  absl::PrintF("\ntrained %d steps, %d tokens in %.0f s: %.0f tokens/s\n", run.steps, run.tokens,
               absl::ToDoubleSeconds(run.elapsed),
               static_cast<double>(run.tokens) / absl::ToDoubleSeconds(run.elapsed));
  absl::PrintF("held-out text          loss (nats/token)   perplexity\n");
  absl::PrintF("  unigram frequencies  %17.3f   %10.1f\n", unigram, std::exp(unigram));
  absl::PrintF("  this model           %17.3f   %10.1f\n", held_out, std::exp(held_out));
  const double margin = absl::GetFlag(FLAGS_margin);
  const bool learned = held_out < unigram - margin;  // false for NaN
  absl::PrintF("%s: %.3f nats below the unigram entropy, %.2f wanted\n", learned ? "learned" : "NOT LEARNED",
               unigram - held_out, margin);
  return learned;
}

absl::StatusOr<bool> Run() {
  const absl::Status flags = CheckFlags();
  if (!flags.ok()) return flags;
  const absl::StatusOr<Data> data = PrepareData();
  if (!data.ok()) return data.status();
  const double unigram = UnigramEntropy(data->train, data->held_out, data->tokenizer.vocab_size());
  const absl::StatusOr<std::optional<TrainerState>> earlier = EarlierState();
  if (!earlier.ok()) return earlier.status();
  absl::StatusOr<std::unique_ptr<RemoteHead>> head = OpenHead(*data, *earlier);
  if (!head.ok()) return head.status();
  StageOne model(ShapeFromFlags(*data), absl::GetFlag(FLAGS_seed));
  absl::PrintF("model: %d parameters here, %d on the server (head %s, [%d, %d])\n", model.parameters().size(),
               (model.shape().output + 1) * data->tokenizer.vocab_size(), absl::GetFlag(FLAGS_head),
               data->tokenizer.vocab_size(), model.shape().output);
  Trainer trainer(TrainerOptionsFromFlags(), data->train, data->tokenizer.vocab_size(), &model, head->get());
  if (earlier->has_value()) {
    const absl::Status restored = trainer.Restore(**earlier);
    if (!restored.ok()) return restored;
    absl::PrintF("going on from step %d and checkpoint %s\n", trainer.steps(), (*earlier)->checkpoint);
  }
  absl::StatusOr<RunResult> run = Train(*data, &trainer, head->get());
  if (!run.ok()) return run.status();
  const absl::StatusOr<double> held_out =
      trainer.Evaluate(data->held_out, static_cast<int64_t>(data->held_out.size()));
  if (!held_out.ok()) return held_out.status();
  run->held_out.push_back({static_cast<double>(run->steps), *held_out});
  PrintCurve(*run, unigram);
  const absl::Status said = PrintContinuations(*data, &trainer);
  if (!said.ok()) return said;
  const bool learned = PrintVerdict(*run, unigram, *held_out);
  if (!absl::GetFlag(FLAGS_keep_head)) {
    const absl::Status deleted = (*head)->Delete();
    if (!deleted.ok()) return deleted;
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
  openblas_set_num_threads(absl::GetFlag(FLAGS_threads));
  const absl::StatusOr<bool> learned = lossd::ngram_lm::Run();
  if (!learned.ok()) {
    absl::FPrintF(stderr, "ngram_lm_demo: %s\n", learned.status().ToString());
    return 2;
  }
  return *learned ? 0 : 1;
}
