// SPDX-License-Identifier: Apache-2.0
// HttpPages has the handlers of the paths for people and their pages: the pages, their script and style, and
// the samples and events as JSON. (Metrics and health have handlers of their own.)
//
//   /              the status page
//   /heads/NAME    the page of a head
//   /history.json  samples; ?after=NUMBER: only later ones; ?head=NAME: of the heads only this one
//   /events.json   events; ?after=ID: only later ones
//   /trace         POST: begins a trace of ?seconds=SECONDS, and says its number
//   /trace.json    POST: hands out the trace ?recording=NUMBER, once it is over, and only once
//   /page/...      script, style and icon of the pages
//
// A parameter that is malformed or unknown is answered with 400. A trace that does not exist is answered with
// 404; a trace that is not over, or that another trace prevents, with 409.
#ifndef LOSSD_SERVER_METRICS_HTTP_PAGES_H_
#define LOSSD_SERVER_METRICS_HTTP_PAGES_H_

#include <cstdint>
#include <functional>
#include <string>

#include "server/metrics/event_log.h"
#include "server/metrics/history.h"
#include "server/metrics/http_router.h"
#include "server/metrics/metrics.h"
#include "server/metrics/status_page.h"
#include "server/metrics/trace_recorder.h"

namespace lossd::metrics {

// Paths for operators only, because a request for such a path makes the server do work.
inline constexpr absl::string_view kOperatorPaths[] = {"/trace", "/trace.json"};

// All outlive the handlers.
struct PageSources {
  const StatusPage* page = nullptr;
  const History* history = nullptr;
  const EventLog* events = nullptr;
  TraceRecorder* trace = nullptr;
  uint64_t incarnation = 0;
  std::function<std::string()> trouble;  // as StatusPage::Render takes it
};
void AddPages(const PageSources& sources, HttpHandlers* handlers);

// The pages of a server, and the samples that they show: from its creation on, samples are taken.
//
// Thread-safe.
class HttpPages {
 public:
  // All outlive this. `trouble` is asked with each request.
  // The pages list the checkpoints of `checkpoint_directory`; empty: they list none.
  HttpPages(const StatusPageOptions& options, const std::string& checkpoint_directory,
            const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics,
            std::function<std::string()> trouble);

  // This outlives the handlers.
  void AddTo(HttpHandlers* handlers) const { AddPages(sources_, handlers); }

 private:
  History history_;
  Sampler sampler_;
  CheckpointLists checkpoints_;
  const StatusPage page_;
  const PageSources sources_;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_PAGES_H_
