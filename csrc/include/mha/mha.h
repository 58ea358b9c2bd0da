/* Multi-head attention in C: the whole public interface. See attention.h for the steps. */
#ifndef MHA_H
#define MHA_H

#include "mha/attention.h"
#include "mha/execution.h"
#include "mha/float_mode.h"
#include "mha/projection.h"
#include "mha/rotary.h"
#include "mha/runtime.h"
#include "mha/status.h"
#include "mha/tensor.h"
#include "mha/transpose.h"

#endif
