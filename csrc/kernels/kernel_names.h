/* KERNEL(operation): mha_<operation>_<dtype>_<isa>, of the element type and instruction set at
 * hand. */
#ifndef MHA_KERNEL_NAMES_H
#define MHA_KERNEL_NAMES_H

#define JOIN_NAMES(operation, dtype, isa) mha_##operation##_##dtype##_##isa
#define EXPAND_NAMES(operation, dtype, isa) JOIN_NAMES(operation, dtype, isa)
#define KERNEL(operation) EXPAND_NAMES(operation, DTYPE, ISA)

#endif
