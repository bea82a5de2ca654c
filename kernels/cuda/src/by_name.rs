//! Calls of an open library, found by name, that return a status as a number: a newer library than
//! the bindings may return one that the bindings' enumeration lacks.

/// Defines functions for calls of a library. `find`, which is unsafe, gives a call by its name, if
/// the library has it; `$missing` is the status of those that it lacks.
macro_rules! calls {
    ($missing:expr; $($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            /// The library's call of this name.
            ///
            /// # Safety
            /// The library is open, and the arguments are as its reference demands.
            pub(super) unsafe fn $name($($argument: $type),*) -> Status {
                type Call = unsafe extern "C" fn($($type),*) -> Status;
                static CALL: std::sync::OnceLock<Option<Call>> = std::sync::OnceLock::new();
                // SAFETY: the library is open, and its call has this type in all versions that are
                // used.
                let call = *CALL.get_or_init(|| unsafe { find(stringify!($name)) });
                match call {
                    // SAFETY: the caller's promise.
                    Some(call) => unsafe { call($($argument),*) },
                    None => $missing as Status,
                }
            }
        )*
    };
}

pub(crate) use calls;
