# The C core as objects and libraries without Python: for make lib, the C tests and the benchmark of
# the kernels. Whoever includes this sets ROOT, BUILD and FLAGS first, and names its own first
# target before.
# WINDOWS=1 builds for Windows, by the compiler of Debian's gcc-mingw-w64-x86-64, or of MSYS2.
ifdef WINDOWS
CC := x86_64-w64-mingw32-gcc
AR := x86_64-w64-mingw32-gcc-ar
# GCC takes its stack for aligned to 32 and 64 bytes there, which that of Windows is not (its bug
# 54412; Debian's and MSYS2's have a patch): moves of vectors must not insist.
FLAGS += -Wa,-muse-unaligned-vector-move
endif
MACHINE := $(subst arm64,aarch64,$(if $(EMULATED_NEON),aarch64,$(shell uname -m)))
IN_LIST := $(ROOT)/csrc/instruction_sets.txt
SETS := $(shell awk '$$1 == "*" || $$1 == "$(MACHINE)" {print $$2}' $(IN_LIST))
flags_in_list = $(shell awk '$$2 == "$(1)" {$$1 = $$2 = ""; print}' $(IN_LIST))
$(foreach set,$(SETS),$(eval FLAGS_$(set) := $(call flags_in_list,$(set))))
FLAGS += -ffp-contract=off -fno-math-errno -Wall -Wextra -Wshadow -Wvla -Werror \
	-I$(ROOT)/csrc/include -I$(ROOT)/csrc
# What the public headers declare is seen from outside the shared library, and nothing else: by its
# visibility, or where Windows has none by mha.def.
FLAGS += -fPIC -fvisibility=hidden -DMHA_BUILDS_LIBRARY

KERNELS := $(foreach set,$(SETS),$(wildcard $(ROOT)/csrc/kernels/kernels_*_$(set).c))
CORE := $(notdir $(basename $(wildcard $(ROOT)/csrc/core/*/*.c $(ROOT)/csrc/threads/*.c)))
CORE += dispatch processor
CORE := $(filter-out %_$(if $(WINDOWS),posix,windows),$(CORE))
OBJECTS := $(addprefix $(BUILD)/,$(addsuffix .o,$(CORE) $(notdir $(basename $(KERNELS)))))
HEADERS := $(wildcard *.h $(ROOT)/csrc/*/*.h $(ROOT)/csrc/*/*.inc \
	$(ROOT)/csrc/*/*/*.h $(ROOT)/csrc/*/*/*.inc)

vpath %.c $(wildcard $(ROOT)/csrc/core/*) $(ROOT)/csrc/threads $(ROOT)/csrc/kernels

.SECONDARY:
$(BUILD):
	@mkdir -p $(BUILD)

$(BUILD)/libmha.a: $(OBJECTS)
	@rm -f $@ && $(AR) rcs $@ $^

$(BUILD)/libmha.so: $(OBJECTS)
	@$(CC) $(FLAGS) -shared $^ -o $@ -lm -pthread

$(BUILD)/mha.dll: $(BUILD)/mha.def $(OBJECTS)
	@$(CC) $(FLAGS) -shared $^ -static-libgcc -Wl,--out-implib,$(BUILD)/libmha.dll.a -o $@

# GCC lists the declarations that it meets, each behind the name of its file.
$(BUILD)/mha.def: $(HEADERS) | $(BUILD)
	@echo '#include "mha/mha.h"' | $(CC) $(FLAGS) -x c -fsyntax-only -aux-info $(BUILD)/declarations -
	@(echo EXPORTS; \
		sed -n 's|^/[*] .*/include/mha/[^ ]* [*]/ extern [^(]*\(mha_[a-z0-9_]*\) (.*|\1|p' \
		$(BUILD)/declarations) >$@

set_of = $(lastword $(subst _, ,$(1)))
$(BUILD)/%.o: %.c $(HEADERS) | $(BUILD)
	@$(CC) $(FLAGS) $(FLAGS_$(call set_of,$*)) -c $< -o $@
