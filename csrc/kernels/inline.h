/* Kernel helpers are static and always inlined: a shared copy could be linked from a unit that was
 * built for another instruction set. */
#ifndef MHA_INLINE_H
#define MHA_INLINE_H

#define INLINE static inline __attribute__((always_inline, unused))

#endif
