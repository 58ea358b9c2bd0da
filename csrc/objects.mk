# The C core as objects and libraries without Python: for make lib, the C tests and the benchmark of
# the kernels. Whoever includes this sets ROOT, BUILD and FLAGS first, and names its own first target
# before.
MACHINE := $(subst arm64,aarch64,$(if $(EMULATED_NEON),aarch64,$(shell uname -m)))
IN_LIST := $(ROOT)/csrc/instruction_sets.txt
SETS := $(shell awk '$$1 == "*" || $$1 == "$(MACHINE)" {print $$2}' $(IN_LIST))
$(foreach set,$(SETS),$(eval FLAGS_$(set) := $(shell awk '$$2 == "$(set)" {$$1 = $$2 = ""; print}' $(IN_LIST))))
FLAGS += -ffp-contract=off -fno-math-errno -Wall -Wextra -Wshadow -Wvla -Werror -I$(ROOT)/csrc/include
# What the public headers declare is seen from outside the shared library, and nothing else.
FLAGS += -fPIC -fvisibility=hidden -DMHA_BUILDS_LIBRARY

KERNELS := $(foreach set,$(SETS),kernels_float32_$(set) kernels_float64_$(set))
CORE := $(notdir $(basename $(wildcard $(ROOT)/csrc/core/*.c) $(wildcard $(ROOT)/csrc/threads/*.c))) dispatch processor
OBJECTS := $(addprefix $(BUILD)/,$(addsuffix .o,$(CORE) $(KERNELS)))
HEADERS := $(wildcard *.h $(ROOT)/csrc/*/*.h $(ROOT)/csrc/*/*.inc $(ROOT)/csrc/include/mha/*.h)

vpath %.c $(ROOT)/csrc/core $(ROOT)/csrc/threads $(ROOT)/csrc/kernels

.SECONDARY:
$(BUILD):
	@mkdir -p $(BUILD)

$(BUILD)/libmha.a: $(OBJECTS)
	@rm -f $@ && $(AR) rcs $@ $^

$(BUILD)/libmha.so: $(OBJECTS)
	@$(CC) $(FLAGS) -shared $^ -o $@ -lm -pthread

set_of = $(lastword $(subst _, ,$(1)))
$(BUILD)/%.o: %.c $(HEADERS) | $(BUILD)
	@$(CC) $(FLAGS) $(FLAGS_$(call set_of,$*)) -c $< -o $@
