//! What operators want to be said: held against everything that could be wrong with it, and written.

use std::sync::Arc;

use super::{Keeper, Known, LONGEST_WORD, Mandate, PutError, Wish, all, directive, lock, said};
use crate::{
    algorithm::Micros,
    engine::{Directives, directives::Target},
    store::{
        StoreError,
        directives::{Change, DirectiveStore, MOST_PARTS, Mark, Part, Put, Written},
    },
};

impl Keeper {
    pub(super) fn check(&self, wishes: &[Wish], mandate: &Mandate) -> Result<(), PutError> {
        mandate.check()?;
        if wishes.iter().filter_map(|wish| wish.word.as_ref()).any(|word| word.len() > LONGEST_WORD) {
            return Err(PutError::Mandate);
        }
        let mut targets: Vec<&Target> = wishes.iter().map(|wish| &wish.target).collect();
        targets.sort_unstable();
        targets.dedup();
        if !(1..=MOST_PARTS).contains(&wishes.len()) || targets.len() < wishes.len() {
            return Err(PutError::Number);
        }
        for wish in wishes {
            let wrong = |source| PutError::Wish { target: wish.target.clone(), source };
            match &wish.word {
                Some(word) => {
                    let directive = directive(wish, word, mandate, Micros::ZERO);
                    Directives::check(&directive, self.options).map_err(wrong)?;
                }
                None => wish.target.check().map_err(|error| wrong(error.into()))?,
            }
        }
        Ok(())
    }

    pub(super) async fn write(
        &self,
        known: &mut Known,
        wishes: &[Wish],
        mandate: &Mandate,
    ) -> Result<Change, PutError> {
        let now = Micros::new(mandate.at);
        // What this instance could not put in force, others could not either.
        let mut trial = known.directives.clone();
        for wish in wishes {
            if let Some(word) = &wish.word {
                let directive = directive(wish, word, mandate, now);
                let wrong = |source| PutError::Wish { target: wish.target.clone(), source };
                trial.put(directive, self.options).map_err(wrong)?;
            }
        }
        let parts: Vec<Put> = wishes
            .iter()
            .map(|wish| Put {
                target: wish.target.to_string(),
                text: wish.word.as_ref().map(|word| said::write(&directive(wish, word, mandate, now))),
                expected: wish.expected,
            })
            .collect();
        let id = format!("{:016x}", rand::random::<u64>());
        let head = serde_json::to_string(mandate).unwrap_or_default();
        let (mark, change) = match &self.store {
            DirectiveStore::Journal(journal) => {
                let change = self.next_change(known, id, head, parts)?;
                let (journal, line, kept) = (Arc::clone(journal), change.clone(), known.directives.clone());
                let (mark, [limits, plans, switches]) = (known.mark.clone(), kept.counts());
                let written = tokio::task::spawn_blocking(move || {
                    lock(&journal).write(&line, limits + plans + switches, || (mark, all(&kept)))
                });
                // What may not have been written is not in force.
                written.await.map_err(|_| StoreError::Refused)??;
                (Mark { version: change.version, ..known.mark.clone() }, change)
            }
            DirectiveStore::Redis(redis) => {
                let longest = self.settings.log_entries;
                let mut written = redis.put_directives((&id, &head), &parts, (&known.mark, false), longest).await?;
                if written.is_none() {
                    // It has lost something, and is told again first.
                    self.look(known).await?;
                    written = redis.put_directives((&id, &head), &parts, (&known.mark, false), longest).await?;
                }
                match written {
                    Some(Written::Done(mark, change)) => (mark, change),
                    Some(Written::Conflict { target, version }) => return Err(PutError::Conflict { target, version }),
                    None => return Err(StoreError::Refused.into()),
                }
            }
        };
        if mark.version == known.mark.version + 1 && (known.mark.epoch == mark.epoch || known.mark.version == 0) {
            self.apply(known, &change);
            known.mark = mark;
            self.heard(known, Ok(()));
        } else {
            let heard = self.look(known).await;
            self.heard(known, heard);
        }
        Ok(change)
    }

    /// As the script has it for Redis.
    fn next_change(&self, known: &Known, id: String, head: String, puts: Vec<Put>) -> Result<Change, PutError> {
        let mut change = Change { version: known.mark.version + 1, id, head, parts: Vec::new() };
        for Put { target, text, expected } in puts {
            let before = Target::parse(&target).ok().and_then(|target| known.directives.get(&target));
            let version = before.as_ref().map_or(0, |before| before.version);
            if expected.is_some_and(|expected| expected != version) {
                return Err(PutError::Conflict { target, version });
            }
            change.parts.push(Part { target, before: before.as_ref().map(said::write), after: text });
        }
        Ok(change)
    }
}
