//! The manual: the same pages as in the book, next to the items they speak of.
//!
//! * [`concepts`]: the words
//! * [`connector`]: how to use the connector, its configuration, what each error means
//! * [`engine`]: how to use the transfer engine
//! * [`failures`]: what happens in each kind of trouble, and in which state memory is then
//! * [`tuning`]: what can be configured, and why one would

// The book's pages link to each other as files. Of two definitions of a link the first counts, so those here lead to
// the modules instead.
macro_rules! page {
    ($($name:ident)*) => {$(
        #[doc = "[connector]: crate::manual::connector"]
        #[doc = "[engine]: crate::manual::engine"]
        #[doc = "[failures]: crate::manual::failures"]
        #[doc = "[tuning]: crate::manual::tuning"]
        #[doc = ""]
        #[doc = include_str!(concat!("../../../docs/src/", stringify!($name), ".md"))]
        pub mod $name {}
    )*};
}

page! { concepts connector engine failures tuning }

/// The book's own first page is no part of the manual; its code is tested all the same.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/quick-start.md")]
mod quick_start {}

/// Nor is the page for those who write a transport.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/transport-authors.md")]
mod transport_authors {}
