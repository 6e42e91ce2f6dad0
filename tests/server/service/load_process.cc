// SPDX-License-Identifier: Apache-2.0
// A client process to be killed: runs ComputeLoss calls on several threads without end.
//
//   service_load_process HOST:PORT HEAD HIDDEN_SIZE ROWS
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/service/service_client.h"
#include "tests/server/service/small_training.h"

namespace lossd::app::testing {
namespace {

struct Load {
  std::string target;
  std::string head;
  int64_t hidden_size;
  int64_t rows;
};

void RunForever(const Load& load, uint64_t first_id) {
  const auto client = TestClient::Connect(load.target);
  const std::vector<float> hidden(static_cast<size_t>(load.rows * load.hidden_size), 0.5f);
  v1::OpenMicrobatch open = OpenSum(std::vector<int32_t>(static_cast<size_t>(load.rows), 0));
  open.set_head(load.head);
  open.set_step(0);
  open.set_accumulate_gradients(true);
  for (uint64_t id = first_id;; ++id) {
    open.set_microbatch_id(id);
    const auto stream = client->OpenLoss();
    stream->SendOpen(open);
    for (int64_t row = 0; row < load.rows; ++row) {
      const auto begin = hidden.begin() + row * load.hidden_size;
      stream->SendSlice(row, row + 1, Bytes(std::vector<float>(begin, begin + load.hidden_size)));
    }
    stream->Finish();
  }
}

}  // namespace
}  // namespace lossd::app::testing

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: " << argv[0] << " HOST:PORT HEAD HIDDEN_SIZE ROWS\n";
    return 2;
  }
  const lossd::app::testing::Load load{argv[1], argv[2], std::atoll(argv[3]), std::atoll(argv[4])};
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 3; ++i) {
    threads.emplace_back(
        [&load, i] { lossd::app::testing::RunForever(load, i << 32 | std::random_device()()); });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
