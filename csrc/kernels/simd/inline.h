/* Kernel helpers are static and always inlined: a shared copy could be linked from a unit that was
 * built for another instruction set. */
#ifndef MHA_INLINE_H
#define MHA_INLINE_H

#define INLINE static inline __attribute__((always_inline, unused))

/* Large bodies that several callers share: one copy each keeps the extension small. Clang makes no
 * others, and has no name for it. */
#ifdef __clang__
#define NOINLINE static __attribute__((noinline))
#else
#define NOINLINE static __attribute__((noinline, noclone))
#endif

/* What seldom runs is compiled for size. */
#define RARE NOINLINE __attribute__((cold))

/* An address that the compiler takes as it is: of rows a stride apart it would carry each one along
 * in a register of its own, and there are not so many. */
#define KEEP_ADDRESS(address) __asm__ volatile("" : "+r"(address))

/* An array that the compiler takes for written: gcc warns of what one turn of a loop writes and
 * only the next one reads. */
#define TAKE_AS_WRITTEN(array) __asm__("" : "=m"(array))

#endif
