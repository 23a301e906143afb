//! [`Server`]: a server, and how to connect to it.

use std::{net::SocketAddr, sync::Arc};

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisFuture, RedisResult,
    aio::MultiplexedConnection, io::AsyncDNSResolver,
};

use crate::login::{Login, Secret, split};

/// Maximum number of calls that wait to be written to the connection.
const MAX_QUEUED_CALLS: usize = 8_192;

/// A server and how to connect to it.
#[derive(Clone)]
pub(crate) struct Server {
    /// Unique name: the address, or in a ring the configured name.
    pub(crate) name: Arc<str>,
    /// The address, with credentials unless there is a `login`.
    pub(super) info: ConnectionInfo,
    /// Credentials that change.
    pub(super) login: Option<Arc<Login>>,
    /// Name that the server's certificate must have, instead of the host in the address.
    pub(super) certificate_name: Option<Arc<str>>,
}

/// A new connection, which is logged in.
pub(crate) struct Connected {
    pub(crate) connection: MultiplexedConnection,
    /// The credentials that were used, if they can change.
    pub(crate) secret: Option<Secret>,
}

impl Server {
    /// Connects without a deadline, which the caller sets.
    pub(crate) async fn connect(&self) -> RedisResult<Connected> {
        let mut info = self.info.clone();
        let secret = match &self.login {
            Some(login) => login.secret().await,
            None => None,
        };
        if let Some(secret) = &secret {
            let (user, password) = split(secret, info.redis_settings());
            let mut settings = info.redis_settings().clone().set_password(password);
            if let Some(user) = user {
                settings = settings.set_username(user);
            }
            info = info.set_redis_settings(settings);
        }
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(MAX_QUEUED_CALLS);
        if let Some(name) = &self.certificate_name
            && let ConnectionAddr::TcpTls { host, port, insecure, tls_params } = info.addr().clone()
        {
            // The client compares the certificate with the host that it connects to.
            config = config.set_dns_resolver(HostOf(host));
            info = info.set_addr(ConnectionAddr::TcpTls { host: name.to_string(), port, insecure, tls_params });
        }
        let connection = Client::open(info)?.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Connected { connection, secret })
    }

    /// Returns the command that logs in with the current credentials, and the credentials. Returns `None` if they equal
    /// `previous` or cannot change.
    pub(crate) fn login_command(&self, previous: &Secret) -> Option<(redis::Cmd, Secret)> {
        let secret = self.login.as_ref()?.changed_since(previous)?;
        let (user, password) = split(&secret, self.info.redis_settings());
        let mut command = redis::cmd("AUTH");
        if let Some(user) = user {
            command.arg(user);
        }
        command.arg(password);
        Some((command, secret))
    }

    /// Requests that the credentials are read again soon, because the server has rejected them.
    pub(crate) fn report_rejected_login(&self) {
        if let Some(login) = &self.login {
            login.report_rejection();
        }
    }

    /// Returns the host or the path in the address.
    pub(crate) fn addr(&self) -> &ConnectionAddr {
        self.info.addr()
    }
}

/// DNS resolver that resolves this host for any requested name, because the requested name is that of the certificate.
struct HostOf(String);

impl AsyncDNSResolver for HostOf {
    fn resolve<'a, 'b: 'a>(
        &'a self,
        _certificate_name: &'b str,
        port: u16,
    ) -> RedisFuture<'a, Box<dyn Iterator<Item = SocketAddr> + Send + 'a>> {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((self.0.as_str(), port)).await?;
            Ok(Box::new(addresses) as Box<dyn Iterator<Item = SocketAddr> + Send>)
        })
    }
}
