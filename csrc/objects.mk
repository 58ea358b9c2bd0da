# The C core as objects without Python, for the C tests and the benchmark of the kernels. Whoever
# includes this sets ROOT, BUILD and FLAGS first, and names its own first target before.
MACHINE := $(if $(EMULATED_NEON),aarch64,$(shell uname -m))
ifeq ($(MACHINE),x86_64)
SETS := baseline avx2 avx512
else ifneq (,$(filter aarch64 arm64,$(MACHINE)))
SETS := baseline neon
else
SETS := baseline
endif
FLAGS += -ffp-contract=off -Wall -Wextra -Wshadow -Wvla -Werror -I$(ROOT)/csrc/include
FLAGS_avx2 := -mavx2 -mfma
FLAGS_avx512 := -mavx512f -mavx512dq -mfma -mprefer-vector-width=512

KERNELS := $(foreach set,$(SETS),kernels_float32_$(set) kernels_float64_$(set))
CORE := $(notdir $(basename $(wildcard $(ROOT)/csrc/core/*.c) $(wildcard $(ROOT)/csrc/threads/*.c))) dispatch
OBJECTS := $(addprefix $(BUILD)/,$(addsuffix .o,$(CORE) $(KERNELS)))
HEADERS := $(wildcard *.h $(ROOT)/csrc/*/*.h $(ROOT)/csrc/*/*.inc $(ROOT)/csrc/include/mha/*.h)

vpath %.c $(ROOT)/csrc/core $(ROOT)/csrc/threads $(ROOT)/csrc/kernels

.SECONDARY:
$(BUILD):
	@mkdir -p $(BUILD)

set_of = $(lastword $(subst _, ,$(1)))
$(BUILD)/%.o: %.c $(HEADERS) | $(BUILD)
	@$(CC) $(FLAGS) $(FLAGS_$(call set_of,$*)) -c $< -o $@
