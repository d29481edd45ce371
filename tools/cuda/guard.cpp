// PyTorch for CPUs has no device guard for CUDA. With this one, which does nothing, FakeTensorMode makes CUDA tensors.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>); }
