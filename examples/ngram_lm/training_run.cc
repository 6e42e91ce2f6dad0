// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/training_run.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/str_format.h"
#include "examples/ngram_lm/progress.h"
#include "kernels/clocks/clock.h"

namespace lossd::ngram_lm {
namespace {

// How much of the training is over.
class Clock {
 public:
  Clock(const RunOptions& options, int64_t first_step)
      : options_(options), first_step_(first_step), start_(clocks::SteadyNow()) {}

  absl::Duration Elapsed() const { return clocks::SteadyNow() - start_; }

  // In [0, 1].
  double Done(int64_t step) const {
    if (options_.steps > 0) return static_cast<double>(step) / static_cast<double>(options_.steps);
    return std::min(1.0, absl::FDivDuration(Elapsed(), options_.time));
  }

  absl::Duration Left(int64_t step) const {
    if (options_.steps == 0) return std::max(options_.time - Elapsed(), absl::ZeroDuration());
    if (step == first_step_) return absl::ZeroDuration();
    return Elapsed() * (options_.steps - step) / (step - first_step_);
  }

 private:
  const RunOptions& options_;
  const int64_t first_step_;
  const absl::Time start_;
};

// The running mean of the loss, and the points of its curve.
class LossCurve {
 public:
  void Add(int64_t step, double loss) {
    ++count_;
    mean_ += (loss - mean_) / static_cast<double>(std::min<int64_t>(count_, kSteps));
    points_.push_back({static_cast<double>(step), mean_});
  }
  double mean() const { return mean_; }
  std::vector<Point> Take() { return std::move(points_); }

 private:
  static constexpr int64_t kSteps = 10;
  int64_t count_ = 0;
  double mean_ = 0;
  std::vector<Point> points_;
};

}  // namespace

double RateMultiplier(double done) {
  constexpr double kWarmUp = 0.03;
  constexpr double kLast = 0.05;
  if (done < kWarmUp) return (done + 0.003) / (kWarmUp + 0.003);
  const double cosine = 0.5 + 0.5 * std::cos(std::numbers::pi * (done - kWarmUp) / (1 - kWarmUp));
  return kLast + (1 - kLast) * cosine;
}

absl::StatusOr<RunResult> RunTraining(const RunOptions& options, absl::Span<const int32_t> held_out,
                                      Trainer* trainer, FILE* out, const StepObserver& on_step) {
  ProgressLine progress(out);
  const Clock clock(options, trainer->steps());
  LossCurve curve;
  RunResult result;
  result.steps = trainer->steps();
  double next_evaluation = 0;
  while (clock.Done(result.steps) < 1) {
    const double done = clock.Done(result.steps);
    if (done >= next_evaluation) {
      const absl::StatusOr<double> loss = trainer->Evaluate(held_out, options.evaluation_tokens);
      if (!loss.ok()) return loss.status();
      result.held_out.push_back({static_cast<double>(result.steps), *loss});
      progress.Print(absl::StrFormat("step %5d   held-out loss %.3f   perplexity %.1f", result.steps, *loss,
                                     std::exp(*loss)));
      next_evaluation = done + 1.0 / options.evaluations;
    }
    const double rate = RateMultiplier(done);
    const absl::StatusOr<double> loss =
        trainer->Step(static_cast<float>(rate) * options.learning_rate, rate * options.head_learning_rate);
    if (!loss.ok()) return loss.status();
    ++result.steps;
    result.tokens += trainer->tokens_per_step();
    curve.Add(result.steps, *loss);
    if (on_step != nullptr) {
      if (absl::Status status = on_step(result.steps, *loss); !status.ok()) return status;
    }
    const double tokens_per_second =
        static_cast<double>(result.tokens) / absl::ToDoubleSeconds(clock.Elapsed());
    progress.Update({result.steps, curve.mean(), tokens_per_second, clock.Left(result.steps)});
  }
  progress.Clear();
  result.train = curve.Take();
  result.elapsed = clock.Elapsed();
  return result;
}

}  // namespace lossd::ngram_lm
