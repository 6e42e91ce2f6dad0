// SPDX-License-Identifier: Apache-2.0
// Turns the protocol's messages into text and JSON (describe.h).
#include "client/cli/describe.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/cli/options.h"

namespace lossd::cli {

// ---- History of a head ----

namespace {

std::string Steps(uint64_t count) { return absl::StrCat(HumanCount(count), count == 1 ? " step" : " steps"); }

std::string CheckpointText(const v1::HeadHistory& history) {
  std::string text =
      absl::StrCat(history.loaded() ? "loaded from " : "saved as ", Printable(history.checkpoint()),
                   " (step ", HumanCount(history.checkpoint_step()), ")");
  if (history.checkpoint_unix_seconds() == 0) return text;
  return absl::StrCat(text, history.loaded() ? ", of " : " ", UtcText(history.checkpoint_unix_seconds()));
}

}  // namespace

std::string UtcText(int64_t unix_seconds) {
  if (unix_seconds == 0) return "";
  return absl::FormatTime("%Y-%m-%d %H:%M:%SZ", absl::FromUnixSeconds(unix_seconds), absl::UTCTimeZone());
}

std::string HistoryText(const v1::HeadHistory& history) {
  std::vector<std::string> parts;
  std::string last;
  if (!history.run().empty()) last = absl::StrCat("run ", Printable(history.run()));
  if (history.applied_unix_seconds() != 0) {
    absl::StrAppend(&last, last.empty() ? "" : ", ", "last step ", UtcText(history.applied_unix_seconds()));
  }
  if (!last.empty()) parts.push_back(std::move(last));
  if (!history.checkpoint().empty()) parts.push_back(CheckpointText(history));
  if (!history.open_run().empty() && history.open_run() != history.run()) {
    parts.push_back(absl::StrCat("rows of the open step from run ", Printable(history.open_run())));
  }
  return absl::StrJoin(parts, "; ");
}

std::optional<uint64_t> StepsSinceSave(const v1::HeadDescription& head) {
  if (head.history().checkpoint().empty()) return std::nullopt;
  if (head.history().checkpoint_step() > head.state().step()) return std::nullopt;
  return head.state().step() - head.history().checkpoint_step();
}

std::string WhatIsLost(const v1::HeadDescription& head) {
  const std::optional<uint64_t> since = StepsSinceSave(head);
  std::string text = absl::StrCat("head \"", Printable(head.spec().name()), "\" is at step ",
                                  HumanCount(head.state().step()), ": ");
  if (since.has_value()) {
    absl::StrAppend(&text, Steps(*since), " since checkpoint ", Printable(head.history().checkpoint()));
  } else {
    text += "no checkpoint known";
  }
  if (head.step_rows() == 0) return text;
  return absl::StrCat(text, ", and ", HumanCount(head.step_rows()), " rows in the open step");
}

// ---- Events ----

namespace {

bool IsEvent(const Json& event) {
  const auto is = [&](const char* name, bool (Json::*of_type)() const noexcept) {
    return event.contains(name) && (event[name].*of_type)();
  };
  return event.is_object() && is("id", &Json::is_number_unsigned) && is("count", &Json::is_number_integer) &&
         is("time", &Json::is_string) && is("level", &Json::is_string) && is("kind", &Json::is_string) &&
         is("head", &Json::is_string) && is("text", &Json::is_string);
}

}  // namespace

absl::StatusOr<Events> ParseEvents(absl::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const absl::Status malformed = absl::InternalError("the server's answer is no list of events");
  if (!json.is_object() || !json.contains("incarnation") || !json["incarnation"].is_string() ||
      !json.contains("last_id") || !json["last_id"].is_number_unsigned() || !json.contains("missed") ||
      !json["missed"].is_boolean() || !json.contains("events") || !json["events"].is_array()) {
    return malformed;
  }
  Events events{.incarnation = json["incarnation"], .last_id = json["last_id"], .missed = json["missed"]};
  for (const Json& event : json["events"]) {
    if (!IsEvent(event)) return malformed;
    events.events.push_back(event);
  }
  return events;
}

nlohmann::ordered_json ToJson(const Events& events) {
  return {{"incarnation", events.incarnation},
          {"last_id", events.last_id},
          {"missed", events.missed},
          {"events", events.events}};
}

std::string EventLine(const Json& event) {
  const auto text = [&event](const char* field) {
    return Printable(event[field].get_ref<const std::string&>());
  };
  const std::string head = text("head");
  const int64_t count = event["count"];
  return absl::StrFormat("%s %-7s %s%s%s", text("time"), text("level"),
                         head.empty() ? "" : absl::StrCat(head, ": "), text("text"),
                         count > 1 ? absl::StrCat(" (", count, " times)") : "");
}

// ---- Descriptions ----

namespace {

std::string UsedMemoryText(const v1::MemoryUsage& memory) {
  std::string parts;
  const auto add = [&parts](const char* name, uint64_t bytes) {
    if (bytes > 0) absl::StrAppend(&parts, parts.empty() ? "" : ", ", name, " ", HumanBytes(bytes));
  };
  add("weights", memory.weights());
  add("gradients", memory.gradients());
  add("optimizer", memory.optimizer());
  add("workspace", memory.workspace());
  add("slots", memory.slots());
  add("staging", memory.staging());
  add("retained", memory.retained());
  add("ledger", memory.ledger());
  add("host values", memory.host_values());
  add("teacher pool", memory.teacher_pool());
  const std::string total = HumanBytes(static_cast<double>(TotalBytes(memory)));
  return parts.empty() ? total : absl::StrCat(total, " (", parts, ")");
}

// Sets each absent field to the default that the protocol gives it.
v1::HeadSpec WithDefaults(v1::HeadSpec spec) {
  if (spec.norm() == v1::NORM_UNSPECIFIED) spec.set_norm(v1::NORM_NONE);
  if (!spec.has_norm_epsilon()) spec.set_norm_epsilon(1e-5f);
  if (spec.optimizer_state() == v1::OPTIMIZER_STATE_UNSPECIFIED)
    spec.set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
  if (spec.logits() == v1::LOGITS_UNSPECIFIED) spec.set_logits(v1::LOGITS_STORED);
  if (spec.gradients() == v1::GRADIENTS_UNSPECIFIED) spec.set_gradients(v1::GRADIENTS_EXACT);
  if (spec.residency() == v1::RESIDENCY_UNSPECIFIED) spec.set_residency(v1::RESIDENCY_DEVICE);
  return spec;
}

// The float as a person writes it: 1e-5 rather than 9.999999747378752e-06.
double AsWritten(float value) {
  double result = value;
  if (!absl::SimpleAtod(absl::StrCat(value), &result)) return value;
  return result;
}

// Empty if there are no choices.
std::string ChoicesTable(const std::string& title,
                         const google::protobuf::RepeatedPtrField<v1::Choice>& choices, const Style& style) {
  if (choices.empty()) return "";
  Table table({{title}, {"CHOICE"}, {"BECAUSE"}, {"WORKSPACE", Align::kRight}});
  for (const v1::Choice& choice : choices) {
    table.AddRow(
        {choice.what(), choice.choice(), choice.reason(),
         choice.workspace_bytes() > 0 ? HumanBytes(static_cast<double>(choice.workspace_bytes())) : ""});
  }
  return absl::StrCat("\n", table.ToString(style));
}

std::string YesNo(bool value) { return value ? "yes" : "no"; }

}  // namespace

uint64_t TotalBytes(const v1::MemoryUsage& memory) {
  return memory.weights() + memory.gradients() + memory.optimizer() + memory.workspace() + memory.slots() +
         memory.staging() + memory.retained() + memory.ledger() + memory.host_values() +
         memory.teacher_pool();
}

namespace {

using google::protobuf::FieldDescriptor;

// The JSON of a field, or of entry `i` of a list.
Json ValueJson(const google::protobuf::Message& message, const FieldDescriptor& field, int i) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const bool list = field.is_repeated();
  const auto value = [&](auto of_field, auto of_list) {
    return list ? (reflection.*of_list)(message, &field, i) : (reflection.*of_field)(message, &field);
  };
  using Reflection = google::protobuf::Reflection;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return value(&Reflection::GetBool, &Reflection::GetRepeatedBool);
    case FieldDescriptor::CPPTYPE_INT32:
      return value(&Reflection::GetInt32, &Reflection::GetRepeatedInt32);
    case FieldDescriptor::CPPTYPE_INT64:
      return value(&Reflection::GetInt64, &Reflection::GetRepeatedInt64);
    case FieldDescriptor::CPPTYPE_UINT32:
      return value(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32);
    case FieldDescriptor::CPPTYPE_UINT64: {
      const uint64_t number = value(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64);
      return field.type() == FieldDescriptor::TYPE_FIXED64 ? Json(HumanIncarnation(number)) : Json(number);
    }
    case FieldDescriptor::CPPTYPE_FLOAT:
      return AsWritten(value(&Reflection::GetFloat, &Reflection::GetRepeatedFloat));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return value(&Reflection::GetDouble, &Reflection::GetRepeatedDouble);
    case FieldDescriptor::CPPTYPE_ENUM:
      return WordOf(*value(&Reflection::GetEnum, &Reflection::GetRepeatedEnum));
    case FieldDescriptor::CPPTYPE_STRING:
      return value(&Reflection::GetString, &Reflection::GetRepeatedString);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return FieldsJson(list ? reflection.GetRepeatedMessage(message, &field, i)
                             : reflection.GetMessage(message, &field));
  }
  return Json();
}

Json ListJson(const google::protobuf::Message& message, const FieldDescriptor& field) {
  Json list = Json::array();
  for (int i = 0; i < message.GetReflection()->FieldSize(message, &field); ++i) {
    list.push_back(ValueJson(message, field, i));
  }
  return list;
}

}  // namespace

Json FieldsJson(const google::protobuf::Message& message) {
  Json json = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    json[field.name()] = field.is_repeated() ? ListJson(message, field) : ValueJson(message, field, 0);
  }
  if (const auto* const memory = dynamic_cast<const v1::MemoryUsage*>(&message); memory != nullptr) {
    json["total"] = TotalBytes(*memory);
  }
  return json;
}

Json ToJson(const v1::HeadDescription& head) {
  Json json = FieldsJson(WithDefaults(head.spec()));
  json["split"] = NameOf(Splits(), head.spec().split());
  json.update(FieldsJson(head.state()));
  Json rest = FieldsJson(head);
  rest.erase("spec");
  rest.erase("state");
  json.update(rest);
  return json;
}

Json ToJson(const v1::ServerDescription& server) {
  Json json = FieldsJson(server);
  if (!server.has_http()) json.erase("http");
  if (server.collectives().empty()) json.erase("collectives");
  if (server.gpu_sharing().empty()) json.erase("gpu_sharing");
  if (server.ranks().empty()) json.erase("ranks");
  return json;
}

std::string Shape(const v1::HeadSpec& spec) {
  std::string text = absl::StrCat(HumanCount(spec.hidden_size()), " x ", HumanCount(spec.vocab_size()));
  if (spec.bias()) absl::StrAppend(&text, " + bias");
  if (spec.norm() > v1::NORM_NONE) absl::StrAppend(&text, ", ", NameOf(spec.norm()));
  if (spec.frozen()) absl::StrAppend(&text, ", frozen");
  return text;
}

// The cells of the columns that --output wide adds to a list of heads: optimizer state, logits, gradients and
// so on.
std::vector<std::string> WideCells(const v1::HeadDescription& head) {
  const v1::HeadSpec spec = WithDefaults(head.spec());
  return {NameOf(spec.optimizer_state()),
          NameOf(spec.logits()),
          NameOf(spec.gradients()),
          HumanCount(head.updates()),
          HumanCount(head.retained_microbatches()),
          HumanCount(head.chunk_rows()),
          spec.residency() == v1::RESIDENCY_HOST && head.paging().on_device() ? "host, on device"
                                                                              : NameOf(spec.residency()),
          HumanIncarnation(head.state().incarnation())};
}

std::string HeadsTable(absl::Span<const v1::HeadDescription> heads, const Style& style) {
  if (heads.empty()) return "no heads; make one with `lossctl create NAME --hidden D --vocab V`\n";
  std::vector<Column> columns = {{"NAME"},
                                 {"HIDDEN x VOCAB"},
                                 {"COMPUTE"},
                                 {"STEP", Align::kRight},
                                 {"STEP ROWS", Align::kRight},
                                 {"TOTAL ROWS", Align::kRight},
                                 {"STREAMS", Align::kRight},
                                 {"QUEUE", Align::kRight},
                                 {"MEMORY", Align::kRight}};
  if (style.wide) {
    columns.insert(columns.end(), {{"OPTIMIZER"},
                                   {"LOGITS"},
                                   {"GRADIENTS"},
                                   {"UPDATES", Align::kRight},
                                   {"RETAINED", Align::kRight},
                                   {"CHUNK ROWS", Align::kRight},
                                   {"VALUES"},
                                   {"INCARNATION"}});
  }
  Table table(std::move(columns));
  for (const v1::HeadDescription& head : heads) {
    std::vector<std::string> cells = {head.spec().name(),
                                      Shape(head.spec()),
                                      NameOf(head.compute_dtype()),
                                      HumanCount(head.state().step()),
                                      HumanCount(head.step_rows()),
                                      HumanCount(head.total_rows()),
                                      HumanCount(head.open_streams()),
                                      HumanCount(head.queued_slices()),
                                      HumanBytes(static_cast<double>(TotalBytes(head.memory())))};
    if (style.wide) {
      for (std::string& cell : WideCells(head)) cells.push_back(std::move(cell));
    }
    table.AddRow(std::move(cells));
  }
  return table.ToString(style);
}

namespace {

// "host memory, on the device now; copied 3 times (1.2 GiB in 0.05 s), found there 12 times, left 2 times".
std::string ResidencyText(const v1::Paging& paging, const Style& style) {
  const std::string where =
      paging.on_device() ? style.Paint(Tone::kGood, "on the device now") : "not on the device";
  if (paging.copies() == 0) return absl::StrCat("host memory, ", where);
  return absl::StrCat("host memory, ", where, "; copied ", HumanCount(paging.copies()), " times (",
                      HumanBytes(static_cast<double>(paging.copied_bytes())), " in ",
                      absl::StrFormat("%.3g s", paging.copy_seconds()), "), found there ",
                      HumanCount(paging.hits()), " times, left ", HumanCount(paging.evictions()), " times");
}

}  // namespace

std::string HeadText(const v1::HeadDescription& head, const Style& style) {
  const v1::HeadSpec spec = WithDefaults(head.spec());
  FieldList fields;
  fields.Add("name", spec.name());
  fields.Add("hidden size", HumanCount(spec.hidden_size()));
  fields.Add("vocabulary", spec.full_vocab_size() == 0
                               ? HumanCount(spec.vocab_size())
                               : absl::StrCat(HumanCount(spec.vocab_size()), " of ",
                                              HumanCount(spec.full_vocab_size()), " classes"));
  fields.Add("bias", YesNo(spec.bias()));
  fields.Add("class weights", YesNo(spec.class_weights()));
  fields.Add("norm", NameOf(spec.norm()));
  fields.Add("compute dtype", NameOf(head.compute_dtype()));
  fields.Add("optimizer state", NameOf(spec.optimizer_state()));
  fields.Add("frozen", YesNo(spec.frozen()));
  fields.Add("logits", NameOf(spec.logits()));
  fields.Add("gradients", NameOf(spec.gradients()));
  fields.Add("split", NameOf(Splits(), spec.split()));
  if (spec.shares_size() > 0) fields.Add("shares", absl::StrJoin(spec.shares(), ", "));
  if (spec.replicas() > 0) fields.Add("replicas", absl::StrCat(spec.replicas()));
  if (spec.residency() == v1::RESIDENCY_HOST) fields.Add("residency", ResidencyText(head.paging(), style));
  if (spec.workspace_bytes() > 0)
    fields.Add("workspace limit", HumanBytes(static_cast<double>(spec.workspace_bytes())));
  fields.Add("open step", absl::StrCat(HumanCount(head.state().step()), " (", HumanCount(head.step_rows()),
                                       " rows of ", HumanCount(head.step_microbatches()), " microbatches)"));
  if (const std::string history = HistoryText(head.history()); !history.empty())
    fields.Add("history", history);
  if (head.step_contributions() > 0)
    fields.Add("added to", absl::StrCat("by ", HumanCount(head.step_contributions()), " contributions"));
  if (head.updates() != head.state().step())
    fields.Add("updates", absl::StrCat(HumanCount(head.updates()), ", other steps were skipped"));
  if (head.retained_microbatches() > 0)
    fields.Add("retained", absl::StrCat(head.retained_microbatches(), " microbatches"));
  fields.Add("rows computed", HumanCount(head.total_rows()));
  fields.Add("streams", absl::StrCat(HumanCount(head.open_streams()), " open, ",
                                     HumanCount(head.queued_slices()), " slices queued"));
  if (!head.waits_for().empty()) {
    fields.Add("waiting", style.Paint(Tone::kWarning, absl::StrCat(HumanCount(head.waiting_slices()),
                                                                   " slices, for ", head.waits_for())));
  }
  fields.Add("slices", absl::StrCat("up to ", HumanCount(head.slice_limits().max_rows()), " rows, ",
                                    HumanBytes(static_cast<double>(head.slice_limits().max_bytes()))));
  if (head.slice_limits().row_grid() > 0) {
    fields.Add("order", absl::StrCat("deterministic, in groups of ",
                                     HumanCount(head.slice_limits().row_grid()), " rows"));
  }
  fields.Add("chunk", absl::StrCat("up to ", HumanCount(head.chunk_rows()), " rows"));
  if (head.gradient_error() > 0) {
    fields.Add("gradient error",
               absl::StrFormat("%.2g predicted, in the last chunk that was sampled", head.gradient_error()));
  }
  fields.Add("memory", UsedMemoryText(head.memory()));
  fields.Add("incarnation", HumanIncarnation(head.state().incarnation()));
  if (style.wide) {
    fields.Add("generation", absl::StrCat(head.state().generation()));
    fields.Add("weights version", absl::StrCat(head.state().weights_version()));
    fields.Add("norm epsilon", absl::StrCat(AsWritten(spec.norm_epsilon())));
  }
  const std::string devices = DevicesTable(head, style);
  return absl::StrCat(fields.ToString(), devices.empty() ? "" : absl::StrCat("\n", devices),
                      ChoicesTable("FULL CHUNKS", head.choices(), style),
                      ChoicesTable("LAST CHUNK", head.last_chunk_choices(), style));
}

std::string DevicesTable(const v1::HeadDescription& head, const Style& style) {
  if (head.devices().empty()) return "";
  Table table({{"DEVICE"},
               {"SHARE", Align::kRight},
               {"CLASSES", Align::kRight},
               {"ROWS", Align::kRight},
               {"COMPUTING", Align::kRight},
               {"EXCHANGING", Align::kRight}});
  for (const v1::HeadDevice& device : head.devices()) {
    const double computing = std::max(0.0, device.busy_seconds() - device.exchange_seconds());
    table.AddRow({Printable(device.device()), absl::StrCat(device.share()), HumanCount(device.classes()),
                  HumanCount(device.rows()), absl::StrFormat("%.1f s", computing),
                  absl::StrFormat("%.1f s", device.exchange_seconds())});
  }
  return table.ToString(style);
}

std::string ServerText(const v1::ServerDescription& server, const std::string& address, const Style& style) {
  FieldList fields;
  fields.Add("address", address);
  fields.Add("version", server.version());
  fields.Add("backend", server.backend());
  fields.Add("device", server.device());
  for (const v1::RankDescription& rank : server.ranks()) {
    fields.Add(
        absl::StrCat("rank ", rank.rank()),
        absl::StrCat(rank.host(), ", ", rank.device(), rank.lost() ? style.Paint(Tone::kBad, ", lost") : ""));
  }
  if (!server.collectives().empty()) fields.Add("collectives", server.collectives());
  if (!server.gpu_sharing().empty()) fields.Add("GPU sharing", server.gpu_sharing());
  fields.Add("state", server.draining() ? style.Paint(Tone::kWarning, "draining")
                                        : style.Paint(Tone::kGood, "serving"));
  fields.Add("up", HumanSeconds(server.uptime_seconds()));
  fields.Add("heads", HumanCount(server.heads()));
  fields.Add("streams", absl::StrCat(HumanCount(server.open_streams()), " of at most ",
                                     HumanCount(server.max_streams())));
  fields.Add("memory", UsedMemoryText(server.memory()));
  fields.Add("memory peak", UsedMemoryText(server.memory_peak()));
  fields.Add("memory limit",
             server.memory_limit() > 0 ? HumanBytes(static_cast<double>(server.memory_limit())) : "none");
  fields.Add("largest message", HumanBytes(static_cast<double>(server.max_message_bytes())));
  fields.Add("incarnation", HumanIncarnation(server.incarnation()));
  if (style.wide) {
    fields.Add("HTTP", !server.has_http() ? "unknown" : server.http().empty() ? "none" : server.http());
    fields.Add("shared memory", server.region_socket().empty() ? "none" : server.region_socket());
  }
  return fields.ToString();
}

}  // namespace lossd::cli
