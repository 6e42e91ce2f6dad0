// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_pages.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"
#include "server/metrics/page_assets.h"

namespace lossd::metrics {
namespace {

constexpr absl::string_view kHtml = "text/html; charset=utf-8";
constexpr absl::string_view kJson = "application/json";

HttpResponse Page(std::string html, int status = 200) {
  return {.status = status, .content_type = std::string(kHtml), .body = std::move(html)};
}

HttpResponse Json(std::string text) { return {.content_type = std::string(kJson), .body = std::move(text)}; }

HttpResponse BadRequest(const absl::Status& status) {
  return {.status = 400, .body = absl::StrCat(status.message(), "\n")};
}

// The parameters of a request: none but `known` ones, and each once.
class Parameters {
 public:
  static absl::StatusOr<Parameters> Read(const HttpCall& call,
                                         std::initializer_list<absl::string_view> known) {
    Parameters parameters;
    for (const auto& [name, value] : call.parameters) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        return errors::FieldError("parameter", absl::StrCat("be one of ", absl::StrJoin(known, ", ")), name);
      }
      if (!parameters.values_.emplace(name, value).second) {
        return errors::FieldProblem(name, "is given twice", value);
      }
    }
    return parameters;
  }

  // 0 if there is none of this name.
  absl::StatusOr<uint64_t> Number(absl::string_view name) const {
    const absl::string_view text = Text(name);
    uint64_t number = 0;
    const bool digits = std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
    if (values_.contains(name) && !(digits && absl::SimpleAtoi(text, &number))) {
      return errors::FieldError(name, "be a number without sign", text);
    }
    return number;
  }

  absl::string_view Text(absl::string_view name) const {
    const auto value = values_.find(name);
    return value == values_.end() ? "" : value->second;
  }

 private:
  std::map<absl::string_view, absl::string_view> values_;
};

HttpResponse HistoryAnswer(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"after", "head"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  const absl::StatusOr<uint64_t> after = parameters->Number("after");
  if (!after.ok()) return BadRequest(after.status());
  return Json(sources.history->Json(sources.incarnation, *after, parameters->Text("head")));
}

HttpResponse EventsAnswer(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"after"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  const absl::StatusOr<uint64_t> after = parameters->Number("after");
  if (!after.ok()) return BadRequest(after.status());
  return Json(ToJson(sources.events->After(*after), sources.incarnation));
}

HttpResponse TraceError(const absl::Status& status) {
  const int code = absl::IsInvalidArgument(status) ? 400 : absl::IsNotFound(status) ? 404 : 409;
  return {.status = code, .body = absl::StrCat(status.message(), "\n")};
}

HttpResponse TraceStart(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"seconds"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  double seconds = 0.0;
  const absl::string_view text = parameters->Text("seconds");
  if (!absl::SimpleAtod(text, &seconds) || !std::isfinite(seconds)) {
    return BadRequest(errors::FieldError("seconds", "be a number", text));
  }
  const absl::StatusOr<uint64_t> recording = sources.trace->Start(absl::Seconds(seconds));
  if (!recording.ok()) return TraceError(recording.status());
  return Json(absl::StrFormat("{\"recording\":%d,\"seconds\":%g}\n", *recording, seconds));
}

HttpResponse TraceAnswer(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"recording"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  const absl::StatusOr<uint64_t> recording = parameters->Number("recording");
  if (!recording.ok()) return BadRequest(recording.status());
  absl::StatusOr<std::string> trace = sources.trace->Take(*recording);
  return trace.ok() ? Json(*std::move(trace)) : TraceError(trace.status());
}

HttpResponse HeadAnswer(const PageSources& sources, const HttpCall& call) {
  if (std::optional<std::string> html = sources.page->RenderHead(call.rest)) return Page(*std::move(html));
  return Page(sources.page->RenderNoHead(call.rest), 404);
}

HttpFunction Asset(absl::string_view content_type, absl::string_view body) {
  return [=](const HttpCall&) {
    return HttpResponse{.content_type = std::string(content_type), .body = std::string(body)};
  };
}

StatusPageOptions WithCheckpoints(StatusPageOptions options, CheckpointLists* checkpoints) {
  options.checkpoints = checkpoints;
  return options;
}

}  // namespace

void AddPages(const PageSources& sources, HttpHandlers* handlers) {
  (*handlers)["/"] = [sources](const HttpCall&) { return Page(sources.page->Render(sources.trouble())); };
  (*handlers)["/heads/"] = [sources](const HttpCall& call) { return HeadAnswer(sources, call); };
  (*handlers)["/history.json"] = [sources](const HttpCall& call) { return HistoryAnswer(sources, call); };
  (*handlers)["/events.json"] = [sources](const HttpCall& call) { return EventsAnswer(sources, call); };
  (*handlers)["/trace"] = {[sources](const HttpCall& call) { return TraceStart(sources, call); },
                           HttpHandler::Effect::kChanges};
  (*handlers)["/trace.json"] = {[sources](const HttpCall& call) { return TraceAnswer(sources, call); },
                                HttpHandler::Effect::kChanges};
  (*handlers)["/page/page.js"] = Asset("text/javascript; charset=utf-8", PageScript());
  (*handlers)["/page/page.css"] = Asset("text/css; charset=utf-8", PageStyle());
  (*handlers)["/page/icon.svg"] = Asset("image/svg+xml", PageIcon());
}

HttpPages::HttpPages(const StatusPageOptions& options, const std::string& checkpoint_directory,
                     const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics,
                     std::function<std::string()> trouble)
    : sampler_(engine, backend, metrics, &history_),
      checkpoints_(checkpoint_directory),
      page_(WithCheckpoints(options, &checkpoints_), engine, backend, metrics, &history_),
      sources_({.page = &page_,
                .history = &history_,
                .events = &metrics->events(),
                .trace = &metrics->trace(),
                .incarnation = engine->incarnation(),
                .trouble = std::move(trouble)}) {
  sampler_.Start();
}

}  // namespace lossd::metrics
