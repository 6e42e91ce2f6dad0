#ifndef LOSSD_SERVER_HEAD_HEAD_H_
#define LOSSD_SERVER_HEAD_HEAD_H_
#include <memory>
#include <string>
#include "kernels/backend.h"
namespace lossd::head {
class Head {
 public:
  Head(std::string name, std::unique_ptr<kernels::HeadKernels> k) : name_(name), kernels_(std::move(k)) {}
  kernels::HeadKernels& kernels() { return *kernels_; }
 private:
  std::string name_;
  std::unique_ptr<kernels::HeadKernels> kernels_;
};
}
#endif
