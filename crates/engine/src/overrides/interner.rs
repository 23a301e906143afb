//! [`Interner`]: reference-counted texts, each stored once, with a parsed value.

use std::{collections::HashMap, sync::Arc};

/// A map of texts to ids and values. A text is removed when the last override that uses it is removed.
#[derive(Clone)]
pub(super) struct Interner<T> {
    /// The texts by id; `None` for free ids.
    entries: Vec<Option<Interned<T>>>,
    by_text: HashMap<Arc<str>, u32>,
    free: Vec<u32>,
}

#[derive(Clone)]
struct Interned<T> {
    text: Arc<str>,
    value: T,
    uses: u32,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), by_text: HashMap::new(), free: Vec::new() }
    }
}

impl<T: Clone> Interner<T> {
    /// Returns the id of a text and increments its use count. Returns `None` if the text is not stored.
    pub(super) fn acquire(&mut self, text: &str) -> Option<u32> {
        let id = *self.by_text.get(text)?;
        self.entries[id as usize].as_mut()?.uses += 1;
        Some(id)
    }

    /// Returns whether a text is stored.
    pub(super) fn contains(&self, text: &str) -> bool {
        self.by_text.contains_key(text)
    }

    /// Stores a new text with one use, and returns its id.
    pub(super) fn insert(&mut self, text: &str, value: T) -> u32 {
        let text: Arc<str> = text.into();
        let id = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.entries[id as usize] = Some(Interned { text: Arc::clone(&text), value, uses: 1 });
        self.by_text.insert(text, id);
        id
    }

    /// Decrements the use count of a text, and removes the text if the count becomes 0.
    pub(super) fn release(&mut self, id: u32) {
        let Some(entry) = self.entries.get_mut(id as usize) else {
            return;
        };
        if let Some(interned) = entry
            && interned.uses > 1
        {
            interned.uses -= 1;
            return;
        }
        if let Some(interned) = entry.take() {
            self.by_text.remove(&interned.text);
            self.free.push(id);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_text.is_empty()
    }

    pub(super) fn value(&self, id: u32) -> Option<&T> {
        self.entries.get(id as usize)?.as_ref().map(|interned| &interned.value)
    }

    pub(super) fn text(&self, id: u32) -> Arc<str> {
        let interned = self.entries.get(id as usize).and_then(Option::as_ref);
        match interned {
            Some(interned) => Arc::clone(&interned.text),
            None => "".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_stored_while_it_is_in_use() {
        let mut interner = Interner::default();
        assert_eq!(interner.acquire("a"), None);
        assert_eq!((interner.insert("a", 1), interner.insert("b", 2), interner.acquire("a")), (0, 1, Some(0)));
        interner.release(0);
        assert_eq!((interner.value(0), &*interner.text(0)), (Some(&1), "a"));
        interner.release(0);
        assert_eq!((interner.acquire("a"), interner.value(0), &*interner.text(0)), (None, None, ""));
        // The next text reuses the free id.
        assert_eq!((interner.insert("c", 3), interner.acquire("b")), (0, Some(1)));
        interner.release(7);
    }
}
