//! The role that each method requires, which is checked before its message is read.

use tonic::Status;

use super::auth::{Caller, Role};

/// The role that each method requires, in the order of `admin.proto`. Its comments name the roles as well.
const ROLES: [(&str, Role); 21] = [
    ("PutOverrides", Role::Operate),
    ("ListOverrides", Role::Read),
    ("ListAuditLog", Role::Read),
    ("Inspect", Role::Read),
    ("ResetCounter", Role::Operate),
    ("Refund", Role::Operate),
    ("ListRules", Role::Public),
    ("ListTopEntities", Role::Read),
    ("GetHealth", Role::Public),
    ("UploadCandidate", Role::Operate),
    ("DropCandidate", Role::Operate),
    ("GetCandidate", Role::Read),
    ("PromoteCandidate", Role::Operate),
    ("RollbackRules", Role::Operate),
    ("GetSession", Role::Public),
    ("WatchActivity", Role::Public),
    ("ListRuleActivity", Role::Public),
    ("GetRuleUsage", Role::Read),
    ("ReadDescriptors", Role::Public),
    ("FindEntities", Role::Read),
    ("Simulate", Role::Read),
];

/// Checks whether a caller may call a method.
///
/// # Errors
///
/// Returns an error if the method does not exist, or the caller does not have the role that it requires.
pub(super) fn authorize(caller: &Caller, method: &str) -> Result<(), Status> {
    let Some((_, required)) = ROLES.iter().find(|(name, _)| *name == method) else {
        return Err(Status::unimplemented(format!("unknown method {method:?}")));
    };
    if caller.role >= *required {
        return Ok(());
    }
    let name = &caller.name;
    Err(Status::permission_denied(if *required == Role::Read {
        "this method requires the role read: send a token (authorization: Bearer TOKEN), or let the setting \
         console.entities admit callers without one"
            .to_owned()
    } else if name.is_empty() {
        "this method requires a token with the role operate".to_owned()
    } else {
        format!("{name} has the role read, and this method requires the role operate")
    }))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{json::SERVICE, openapi::comment},
        *,
    };

    #[test]
    fn the_table_has_each_method_with_the_role_of_its_comment() {
        let mut documented = Vec::new();
        for method in SERVICE.as_ref().unwrap().methods() {
            let comment = comment(&method.parent_file(), method.path());
            let role = if comment.contains("Requires the role `operate`") {
                Role::Operate
            } else if comment.contains("Available to the role `public`") {
                Role::Public
            } else {
                Role::Read
            };
            documented.push((method.name().to_owned(), role));
        }
        assert_eq!(documented, ROLES.map(|(name, role)| (name.to_owned(), role)));
    }

    #[test]
    fn each_role_may_call_the_methods_of_the_one_before() {
        let code = |role, method| {
            let caller = Caller { name: "eve".into(), role };
            authorize(&caller, method).map_err(|status| status.code())
        };
        for (role, permitted) in [(Role::Public, 1), (Role::Read, 2), (Role::Operate, 3)] {
            for (number, method) in ["GetSession", "Inspect", "PutOverrides"].into_iter().enumerate() {
                assert_eq!(code(role, method).is_ok(), number < permitted, "{role:?} {method}");
            }
            assert_eq!(code(role, "Fly"), Err(tonic::Code::Unimplemented));
        }
    }
}
