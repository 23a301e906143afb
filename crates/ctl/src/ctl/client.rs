//! [`Client`]: calls the admin API of one or more instances.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use clap::Args;
use sluicegate_proto::sluicegate::admin::v1::{self as api, admin_service_client::AdminServiceClient};
use tonic::{
    Code, Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};

use super::{
    super::grpc::{self, Tls},
    changes::{changes_nothing, print_warnings},
};

/// Addresses of the instances, and credentials.
#[derive(Debug, Args)]
pub(super) struct Connection {
    /// Admin address of an instance (http:// or https://), or of several, separated by commas
    #[arg(
        long,
        global = true,
        env = "SLUICEGATE_ADMIN",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8082",
        help_heading = "Connection"
    )]
    addr: Vec<String>,
    /// File that contains the token [env: `SLUICEGATE_TOKEN_FILE`]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Connection")]
    token_file: Option<PathBuf>,
    /// Token; a file is safer, because other users of the host can read command lines [env: `SLUICEGATE_TOKEN`]
    #[arg(long, global = true, conflicts_with = "token_file", help_heading = "Connection")]
    token: Option<String>,
    #[command(flatten)]
    tls: Tls,
}

/// Client of the admin API of one instance.
pub(super) type Service = AdminServiceClient<InterceptedService<Channel, Token>>;

/// Interceptor that adds the token to every call.
#[derive(Clone)]
pub(super) struct Token(Option<MetadataValue<Ascii>>);

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// Connections to the instances. Changes and most queries go to the first one.
pub(super) struct Client {
    instances: Vec<(String, Service)>,
}

/// End of the message if nothing listens at the admin address.
const NOT_LISTENING: &str = "nothing listens at this address; the service has an admin API only if admin.addr is set";

/// A result per instance, with its address.
pub(super) type PerInstance<T> = Vec<(String, anyhow::Result<T>)>;

impl Client {
    pub(super) async fn new(connection: &Connection) -> anyhow::Result<Self> {
        let token = read_token(connection)?;
        let mut instances = Vec::new();
        for addr in &connection.addr {
            let addr = grpc::address(addr)?;
            let channel = connection.tls.endpoint(&addr)?.connect_lazy();
            let service = AdminServiceClient::with_interceptor(channel, Token(token.clone()));
            instances.push((addr, service.max_decoding_message_size(1 << 24)));
        }
        Ok(Self { instances })
    }

    /// Calls a method of the first instance.
    pub(super) async fn call<T>(
        &mut self,
        method: impl AsyncFnOnce(&mut Service) -> Result<Response<T>, Status>,
    ) -> anyhow::Result<T> {
        let (addr, service) = self.instances.first_mut().context("--addr contains no address")?;
        response_or_error(addr, method(service).await)
    }

    pub(super) async fn put(&mut self, request: api::PutOverridesRequest) -> anyhow::Result<api::PutOverridesResponse> {
        self.call(async |service| service.put_overrides(request).await).await
    }

    /// Sends the change to each instance, and returns an error if one of them has not accepted it, or if nothing changed
    /// on any of them. Calls `on_success` with the address of each instance that has accepted it.
    pub(super) async fn put_on_each_instance(
        &mut self,
        request: api::PutOverridesRequest,
        on_success: impl Fn(&str, &api::PutOverridesResponse),
    ) -> anyhow::Result<()> {
        let mut failed = 0;
        let mut changed_any = false;
        for (addr, service) in &mut self.instances {
            match response_or_error(addr, service.put_overrides(request.clone()).await) {
                Ok(response) => {
                    print_warnings(&response.warnings);
                    changed_any |= !changes_nothing(&response);
                    on_success(addr, &response);
                }
                Err(error) => {
                    failed += 1;
                    eprintln!("{error:#}");
                }
            }
        }
        if failed > 0 {
            bail!("{failed} of {} instances have not accepted the change", self.instances.len());
        }
        if !changed_any {
            bail!("nothing was removed");
        }
        Ok(())
    }

    /// Returns the overrides of targets that begin with `prefix`.
    pub(super) async fn list(&mut self, prefix: &str) -> anyhow::Result<Vec<api::Override>> {
        let mut all = Vec::new();
        let mut page_token = String::new();
        loop {
            let page = self.page(prefix, page_token).await?;
            all.extend(page.overrides);
            if page.next_page_token.is_empty() {
                return Ok(all);
            }
            page_token = page.next_page_token;
        }
    }

    pub(super) async fn page(
        &mut self,
        prefix: &str,
        page_token: String,
    ) -> anyhow::Result<api::ListOverridesResponse> {
        let request = api::ListOverridesRequest { prefix: prefix.to_owned(), page_size: 1_000, page_token };
        self.call(async |service| service.list_overrides(request).await).await
    }

    pub(super) async fn rules(&mut self, request: api::ListRulesRequest) -> anyhow::Result<api::ListRulesResponse> {
        self.call(async |service| service.list_rules(request).await).await
    }

    pub(super) async fn health(&mut self) -> PerInstance<api::GetHealthResponse> {
        let mut all = Vec::new();
        for (addr, service) in &mut self.instances {
            all.push((addr.clone(), response_or_error(addr, service.get_health(api::GetHealthRequest {}).await)));
        }
        all
    }

    /// Returns the state of the candidate rules on each instance.
    pub(super) async fn candidates(&mut self) -> anyhow::Result<Vec<(String, api::GetCandidateResponse)>> {
        let mut all = Vec::new();
        for (addr, service) in &mut self.instances {
            all.push((
                addr.clone(),
                response_or_error(addr, service.get_candidate(api::GetCandidateRequest {}).await)?,
            ));
        }
        Ok(all)
    }

    /// Returns the entities with the most denied requests or hits, and the descriptors that no rule matches, summed over
    /// all instances.
    pub(super) async fn top(
        &mut self,
        request: &api::ListTopEntitiesRequest,
    ) -> anyhow::Result<api::ListTopEntitiesResponse> {
        let mut merged = api::ListTopEntitiesResponse::default();
        let mut sums: BTreeMap<String, api::TopEntity> = BTreeMap::new();
        let mut unmatched: BTreeMap<(String, Vec<String>, bool), api::UnmatchedDescriptors> = BTreeMap::new();
        for (addr, service) in &mut self.instances {
            // An entity that is in twentieth place on every instance may be first in the sum.
            let request = api::ListTopEntitiesRequest { max_results: 1_000, ..request.clone() };
            let response = response_or_error(addr, service.list_top_entities(request).await)?;
            merged.period_seconds = merged.period_seconds.max(response.period_seconds);
            merged.total_hits += response.total_hits;
            merged.total_requests += response.total_requests;
            merged.instances.extend(response.instances);
            for group in response.unmatched {
                let name = (group.domain.clone(), group.keys.clone(), group.unknown_domain);
                let sum = unmatched.entry(name).or_insert_with(|| api::UnmatchedDescriptors {
                    recent: 0,
                    total: 0,
                    ..group.clone()
                });
                sum.recent += group.recent;
                sum.total += group.total;
            }
            for top in response.entities {
                let name = top.descriptor.as_ref().map(super::parse::limit_target_name).unwrap_or_default();
                let sum = sums.entry(name).or_insert_with(|| api::TopEntity {
                    hits: 0,
                    max_error: 0,
                    requests: 0,
                    max_request_error: 0,
                    ..top.clone()
                });
                sum.requests += top.requests;
                sum.max_request_error += top.max_request_error;
                sum.hits += top.hits;
                sum.max_error += top.max_error;
                if let Some(since) = &top.since
                    && let Some(before) = &sum.since
                    && (since.seconds, since.nanos) < (before.seconds, before.nanos)
                {
                    sum.since = top.since;
                }
            }
        }
        merged.entities = sums.into_values().collect();
        let by_hits = request.rank_by == i32::from(api::RankBy::Requested);
        merged.entities.sort_by_key(|top| std::cmp::Reverse(if by_hits { top.hits } else { top.requests }));
        merged.entities.truncate(request.max_results as usize);
        merged.unmatched = unmatched.into_values().collect();
        merged.unmatched.sort_by_key(|group| std::cmp::Reverse((group.recent, group.total)));
        Ok(merged)
    }
}

/// Error of a call to an instance.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
struct CallError {
    code: Code,
    message: String,
}

/// Returns whether the call failed because the store or the instance was unavailable, so that it can be retried.
pub(super) fn is_retryable(error: &anyhow::Error) -> bool {
    error.downcast_ref::<CallError>().is_some_and(|call_error| call_error.code == Code::Unavailable)
}

/// A token as it was read.
struct TokenText {
    text: String,
    /// Where it was read, for messages.
    source: String,
}

impl TokenText {
    fn of_file(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { text, source: format!("the token file {}", path.display()) })
    }
}

/// Returns the token of the command line, or else of the environment.
fn token_text(connection: &Connection) -> anyhow::Result<Option<TokenText>> {
    if let Some(path) = &connection.token_file {
        return TokenText::of_file(path).map(Some);
    }
    if let Some(token) = &connection.token {
        return Ok(Some(TokenText { text: token.clone(), source: "the token".to_owned() }));
    }
    if let Some(path) = env::var_os("SLUICEGATE_TOKEN_FILE").filter(|path| !path.is_empty()) {
        return TokenText::of_file(Path::new(&path)).map(Some);
    }
    let token = env::var("SLUICEGATE_TOKEN").ok().filter(|token| !token.is_empty());
    Ok(token.map(|text| TokenText { text, source: "the token in SLUICEGATE_TOKEN".to_owned() }))
}

/// Returns the value of the header with the token.
fn read_token(connection: &Connection) -> anyhow::Result<Option<MetadataValue<Ascii>>> {
    let Some(TokenText { text, source }) = token_text(connection)? else {
        return Ok(None);
    };
    let token = text.trim();
    if token.is_empty() {
        bail!("{source} is empty");
    }
    if token.contains(char::is_whitespace) {
        bail!("{source} must contain the token alone, not `operate TOKEN NAME` as in the service's admin.token_file");
    }
    let value = format!("Bearer {token}").parse();
    Ok(Some(value.with_context(|| format!("{source} contains characters that are not allowed in a header"))?))
}

/// Returns the response, or an error with the status message and all of its causes.
fn response_or_error<T>(addr: &str, response: Result<Response<T>, Status>) -> anyhow::Result<T> {
    response.map(Response::into_inner).map_err(|status| {
        let message = match status.code() {
            Code::Unimplemented => "this is not the admin address (default port 8082; 8080 is HTTP, 8081 is gRPC), or \
                                    the service is too old for this command"
                .to_owned(),
            _ => grpc::message(&status, NOT_LISTENING),
        };
        CallError { code: status.code(), message: format!("{addr}: {message} ({:?})", status.code()) }.into()
    })
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use super::*;

    #[test]
    fn only_calls_that_were_unavailable_are_retried() {
        let error = |code| response_or_error::<()>("http://a", Err(Status::new(code, "message"))).unwrap_err();
        assert!(is_retryable(&error(Code::Unavailable)));
        assert!(!is_retryable(&error(Code::InvalidArgument)));
        assert!(!is_retryable(&anyhow::anyhow!("not a call")));
    }

    #[test]
    fn an_error_contains_each_cause_once() {
        for message in ["cannot connect", "cannot connect: refused"] {
            let mut status = Status::unavailable(message);
            status.set_source(Arc::new(io::Error::other("refused")));
            let error = response_or_error::<()>("http://a", Err(status)).unwrap_err();
            assert_eq!(error.to_string(), "http://a: cannot connect: refused (Unavailable)");
        }
    }
}
