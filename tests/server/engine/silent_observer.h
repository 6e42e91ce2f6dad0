// SPDX-License-Identifier: Apache-2.0
// An observer that does nothing, for tests that look at some events only.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SILENT_OBSERVER_H_
#define LOSSD_TESTS_SERVER_ENGINE_SILENT_OBSERVER_H_

#include "server/engine/engine_options.h"

namespace lossd::engine {

class SilentObserver : public EngineObserver {
 public:
  void OnChunk(const ChunkReport&) override {}
  void OnChunkLeft(const ChunkReport&) override {}
  void OnChoices(const ChoicesReport&) override {}
  void OnContribution(const ContributionReport&) override {}
  void OnStep(const StepReport&) override {}
  void OnDeviceError(const absl::Status&) override {}
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_SILENT_OBSERVER_H_
