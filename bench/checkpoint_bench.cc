// SPDX-License-Identifier: Apache-2.0
// Measures how fast a head is saved to disk and loaded again, compared with writing and reading the same
// bytes without lossd.
//
// The tensors are copied from and to memory, without a device. So the benchmark measures the disk, the disk
// threads and the checksums; a device would add its own copies. Before each load, the files are dropped from
// the page cache. Prints one line for each round, and the medians:
//
//   server_bench checkpoint --directory=/var/tmp --hidden=4096 --vocab=32768 --rounds=5
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "bench/command.h"
#include "bench/server_bench.h"
#include "kernels/clocks/clock.h"
#include "server/head/checkpoint.h"

namespace lossd::bench::checkpoint {
namespace {

struct Flags : CommandFlags {
  Flag<std::string> directory{this, "directory", "/var/tmp",
                              "where checkpoints are written, in a folder that is removed"};
  Flag<int64_t> hidden{this, "hidden", 4096, "hidden size of the head"};
  Flag<int64_t> vocab{this, "vocab", 32768,
                      "its classes; a class takes 12 bytes for each of the hidden size"};
  Flag<int> rounds{this, "rounds", 5, "saves and loads"};
  Flag<int64_t> buffer_mib{this, "buffer_mib", 1024, "what a save may read ahead of the disk"};
  Flag<int64_t> shard_mib{this, "shard_mib", 1024, "the most bytes of a file"};
  Flag<bool> cold{this, "cold", true, "files leave the page cache before they are loaded"};
  Flag<bool> verify_first{this, "verify_first", true,
                          "load as into a head that exists: read everything twice"};
  Flag<int> threads{this, "threads", 4, "threads that write, or read, at once"};
} flags;

namespace fs = std::filesystem;

struct Round {
  double read = 0;  // seconds during which the head must not change
  double save = 0;
  double load = 0;
};

// Bytes that a file system can neither store as a hole nor compress.
std::vector<uint8_t> Noise(size_t bytes) {
  std::vector<uint8_t> noise(bytes);
  uint64_t state = 88172645463325252u;
  for (size_t i = 0; i + sizeof(state) <= bytes; i += sizeof(state)) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(&noise[i], &state, sizeof(state));
  }
  return noise;
}

// Drops the folder's files from the page cache. Data that is not on the disk yet stays in the page cache.
void LeavePageCache(const std::string& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    (void)posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
  }
}

head::SaveOptions Options() {
  head::SaveOptions options;
  options.buffer_bytes = *flags.buffer_mib << 20;
  options.shards = {.most_bytes = *flags.shard_mib << 20, .threads = *flags.threads};
  return options;
}

absl::StatusOr<Round> RunRound(const std::string& directory, const head::CheckpointSubject& subject,
                               const std::vector<uint8_t>& noise) {
  Round round;
  head::SaveOptions options = Options();
  const absl::Time begin = clocks::SteadyNow();
  options.on_read = [&] { round.read = absl::ToDoubleSeconds(clocks::SteadyNow() - begin); };
  const auto saved = head::SaveCheckpoint(
      directory, "x", subject,
      [&](kernels::TensorId, int64_t row, int64_t, absl::Span<uint8_t> out) {
        // Different rows get different bytes of the noise.
        const size_t from = static_cast<size_t>(row) * 64 % (noise.size() - out.size() + 1);
        std::memcpy(out.data(), &noise[from], out.size());
        return absl::OkStatus();
      },
      options);
  if (!saved.ok()) return saved.status();
  round.save = absl::ToDoubleSeconds(clocks::SteadyNow() - begin);
  if (*flags.cold) LeavePageCache(directory);
  std::vector<uint8_t> device(options.slice_bytes);
  const absl::Time load_begin = clocks::SteadyNow();
  const auto reader = head::CheckpointReader::Open(directory, subject.head + "/x");
  if (!reader.ok()) return reader.status();
  const absl::Status loaded = (*reader)->Load(
      [&](kernels::TensorId, int64_t, int64_t, absl::Span<const uint8_t> in) {
        std::memcpy(device.data(), in.data(), in.size());
        return absl::OkStatus();
      },
      {.threads = *flags.threads, .verify_first = *flags.verify_first});
  if (!loaded.ok()) return loaded;
  round.load = absl::ToDoubleSeconds(clocks::SteadyNow() - load_begin);
  return round;
}

double Median(std::vector<Round> rounds, double Round::*field) {
  std::sort(rounds.begin(), rounds.end(),
            [&](const Round& a, const Round& b) { return a.*field < b.*field; });
  return rounds[rounds.size() / 2].*field;
}

void Print(const std::string& name, const Round& round, double bytes) {
  std::cout << absl::StrFormat("%-8s held %6.3f s   save %6.3f s %5.2f GB/s   load %6.3f s %5.2f GB/s\n",
                               name, round.read, round.save, bytes / round.save / 1e9, round.load,
                               bytes / round.load / 1e9)
            << std::flush;
}

absl::Status RunRounds(const std::string& directory) {
  head::CheckpointSubject subject;
  subject.head = "head";
  subject.config.hidden_size = *flags.hidden;
  subject.config.vocab_size = *flags.vocab;
  const std::vector<uint8_t> noise = Noise(size_t{64} << 20);
  // A value and two moments in fp32 for each element of the weight: 12 bytes.
  const double bytes =
      12.0 * static_cast<double>(subject.config.hidden_size) * static_cast<double>(subject.config.vocab_size);
  std::vector<Round> rounds;
  for (int i = 0; i < *flags.rounds; ++i) {
    const absl::StatusOr<Round> round = RunRound(directory, subject, noise);
    if (!round.ok()) return round.status();
    Print(std::to_string(i), *round, bytes);
    rounds.push_back(*round);
    fs::remove_all(directory + "/" + subject.head);
  }
  Print("median",
        {.read = Median(rounds, &Round::read),
         .save = Median(rounds, &Round::save),
         .load = Median(rounds, &Round::load)},
        bytes);
  return absl::OkStatus();
}

int Main() {
  std::string directory = *flags.directory + "/checkpoint_bench-XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) {
    std::cerr << "checkpoint: cannot make " << directory << "\n";
    return 1;
  }
  const absl::Status status = RunRounds(directory);
  fs::remove_all(directory);
  if (status.ok()) return 0;
  std::cerr << "checkpoint: " << status << "\n";
  return 1;
}

}  // namespace
}  // namespace lossd::bench::checkpoint

namespace lossd::bench {

int RunCheckpointBench(int argc, char** argv) {
  checkpoint::flags.Parse(argc, argv);
  return checkpoint::Main();
}

}  // namespace lossd::bench
