/* Kernel helpers are static and always inlined: a shared copy could be linked from a unit that was
 * built for another instruction set. */
#ifndef MHA_INLINE_H
#define MHA_INLINE_H

#define INLINE static inline __attribute__((always_inline, unused))

/* Large bodies that several callers share: one copy each keeps the extension small. */
#define NOINLINE static __attribute__((noinline, noclone))

/* What seldom runs is compiled for size. */
#define RARE static __attribute__((noinline, noclone, cold))

/* An address that the compiler takes as it is: of rows a stride apart it would carry each one along
 * in a register of its own, and there are not so many. */
#define KEEP_ADDRESS(address) __asm__ volatile("" : "+r"(address))

#endif
